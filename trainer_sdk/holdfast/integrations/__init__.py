"""Holdfast inside training frameworks: one module each, imported only by who uses that framework. docs/integrations.md.

hf          Trainer of transformers: HoldfastTrainer, or HoldfastTrainerMixin before a Trainer of your own
accelerate  training_state(accelerator): what accelerator.save_state() would write, for a Checkpointer
lightning   HoldfastCheckpointIO for one process, HoldfastStrategyMixin for several, HoldfastCallback for both
torchtitan  HoldfastCheckpointManager: its Config in the place of torchtitan's own
"""
