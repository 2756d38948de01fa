"""Holdfast inside training frameworks: one module each, imported only by users of that framework. docs/integrations.md.

hf          Trainer of transformers: HoldfastTrainer, or HoldfastTrainerMixin before a Trainer of your own
accelerate  training_state(accelerator): the content of accelerator.save_state(), for a Checkpointer
hf_files    ModelFiles: config and tokenizer of a model of transformers, in its checkpoints
lightning   HoldfastCheckpointIO for one process, HoldfastStrategyMixin for several, HoldfastCallback for both
torchtitan  HoldfastCheckpointManager: its Config in the place of torchtitan's own
deepspeed   engine_state(engine): the content of engine.save_checkpoint() with ZeRO 1 to 3, for a Checkpointer
megatron    save() and load() of a sharded state dict of Megatron-core, in the place of dist_checkpointing's
mlflow      MlflowRestorePoints: an MLflow run that has the restore points by reference
wandb       WandbRestorePoints: the same for Weights & Biases
"""
