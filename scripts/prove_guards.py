"""Take the guards of the rules out, one at a time, and see that a test named after the rule fails.

    .venv/bin/python scripts/prove_guards.py [RULE …]        (or: make prove)

For each rule below: copy the committed tree, check that the rule's tests pass there, replace the guard's text, run the
same tests again. The rule is defended if they fail then. A guard whose text is no longer in its file is an error: move
the entry along with the code. Exit code 0 only if every guard is defended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "service", "trainer_sdk")
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Guard:
    rule: str
    what: str
    path: str
    text: str
    without: str
    tests: tuple[str, ...]


GUARDS = (
    Guard(
        "protocol-1",
        "writes do not hold the run's row against a new attempt",
        "service/holdfast_service/catalog/fencing.py",
        ".with_for_update(read=True)",
        "",
        ("tests/service/test_protocol_commit_races.py",),
    ),
    Guard(
        "protocol-3",
        "a job that goes back stays the attempt whose saves it leaves",
        "trainer_sdk/holdfast/health/rollback.py",
        "self._session.open_anew()",
        "pass",
        ("tests/trainer/test_rollback.py",),
    ),
    Guard(
        "protocol-4",
        "a late save is adopted by an attempt that saves steps of its own already",
        "service/holdfast_service/commit/late.py",
        "if session.scalar(select(begun)):",
        "if False:",
        ("tests/service/test_protocol_spooled.py",),
    ),
    Guard(
        "protocol-4",
        "a branch off the line can be the restore point",
        "service/holdfast_service/catalog/restore_choice.py",
        "elif line is not None and candidate.off_line:",
        "elif False:",
        ("tests/service/test_protocol_spooled.py",),
    ),
    Guard(
        "protocol-4",
        "a record of the spool that was torn or altered is pushed",
        "client/holdfast_client/local/spool_record.py",
        'if not hmac.compare_digest(_digest_of(outer["record"]), str(outer["sha256"])):',
        "if False:",
        ("tests/unit/test_spool.py",),
    ),
    Guard(
        "protocol-4",
        "a save that is not committed makes room for the next one",
        "client/holdfast_client/local/keep.py",
        "    hold.add([hashed.digest])",
        "    del hold",
        ("tests/unit/test_spool.py",),
    ),
    Guard(
        "protocol-8",
        "a rank may report failure after it has sealed",
        "service/holdfast_service/commit/fail.py",
        "if shard.state == ShardState.SEALED:",
        "if False:",
        ("tests/service/test_protocol_commit.py",),
    ),
    Guard(
        "protocol-9",
        "the last seals do not lock the checkpoint before they count",
        "service/holdfast_service/commit/seal.py",
        "context.epoch, lock=True)",
        "context.epoch)",
        ("tests/service/test_protocol_commit_races.py",),
    ),
    Guard(
        "protocol-14",
        "the store's checksum of compressed bytes proves the chunk",
        "service/holdfast_service/catalog/verification.py",
        "raw = upload.stored_digest == upload.key.digest",
        "raw = True",
        ("tests/service/test_protocol_codecs.py",),
    ),
    Guard(
        "protocol-14",
        "compressed bytes are read and not decoded before they are trusted",
        "service/holdfast_service/catalog/reread.py",
        "return Finding.GOOD if digest.hexdigest() == claimed.digest else Finding.WRONG_BYTES",
        "return Finding.GOOD",
        ("tests/service/test_protocol_codecs.py",),
    ),
    Guard(
        "protocol-15",
        "any copy counts as present",
        "service/holdfast_service/uploads/decide.py",
        "usable = [copy for copy in copies if usable_by(copy, attempt_id)]",
        "usable = list(copies)",
        ("tests/service/test_protocol_chunks.py",),
    ),
    Guard(
        "protocol-17",
        "all copies of a chunk share one generation",
        "service/holdfast_service/uploads/reserve.py",
        "generation=uuid.uuid4().hex",
        'generation="0" * 32',
        ("tests/service/test_protocol_chunks.py",),
    ),
    Guard(
        "protocol-14",
        "a copy in another store is proven by reading the first store",
        "service/holdfast_service/catalog/reread.py",
        "store = context.store_of(claimed.store_id)",
        "store = context.store",
        ("tests/service/test_scrub.py",),
    ),
    Guard(
        "protocol-17",
        "a mark is taken back before anybody has read the new copy",
        "service/holdfast_service/catalog/corruption.py",
        "        keeps_anywhere(checkpoint.attempt_id),\n        read_since_damage(),\n",
        "        keeps_anywhere(checkpoint.attempt_id),\n",
        ("tests/service/test_heal.py",),
    ),
    Guard(
        "protocol-17",
        "a new copy heals the rotten one before it was read",
        "service/holdfast_service/scrub/mend_chunk.py",
        "                Copy.proof == Proof.READ,\n                Copy.verified_at > damaged.bad_at,\n",
        "",
        ("tests/service/test_heal.py",),
    ),
    Guard(
        "protocol-22",
        "what is found in another's bucket or an empty mount condemns copies",
        "service/holdfast_service/catalog/reread.py",
        "    if finding is not Finding.GOOD:\n        refuse_wrong_store(context, store)",
        "    if False:\n        refuse_wrong_store(context, store)",
        ("tests/service/test_scrub.py",),
    ),
    Guard(
        "protocol-22",
        "a copy that was not read yet holds no mark back",
        "service/holdfast_service/catalog/copies.py",
        "Copy.state.in_((*KEPT, CopyState.SUSPECT)), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id)",
        "Copy.state.in_(KEPT), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id)",
        ("tests/service/test_scrub.py",),
    ),
    Guard(
        "protocol-22",
        "a report makes copies suspect before anybody has read them",
        "service/holdfast_service/restore/report_chunk.py",
        "claim(session, chunk, copy, until, suspect=False)",
        "claim(session, chunk, copy, until, suspect=True)",
        ("tests/service/test_protocol_reading.py",),
    ),
    Guard(
        "protocol-26",
        "a mark that can be taken back makes a checkpoint expire",
        "service/holdfast_service/retention/plan.py",
        "    found = {**_were_they_whole(policy, run, found), **found}\n",
        "",
        ("tests/unit/test_retention_plan.py",),
    ),
    Guard(
        "protocol-28",
        "a bad copy in one store marks checkpoints that another store keeps whole",
        "service/holdfast_service/catalog/corruption.py",
        "kept = exists().where(Copy.chunk_id == chunk_id, may_keep(Checkpoint.attempt_id))",
        "kept = exists().where(Copy.chunk_id == chunk_id, may_keep(Checkpoint.attempt_id), Copy.store_id == 1)",
        ("tests/service/test_scrub.py",),
    ),
    Guard(
        "protocol-15",
        "a hot copy goes in favour of a cold one that nobody has looked at since",
        "service/holdfast_service/tiers/look.py",
        "        good = _is_good(context, claimed, place, on_bytes)\n",
        "        good = True\n",
        ("tests/service/test_cold_rot.py",),
    ),
    Guard(
        "protocol-28",
        "whoever reads a copy brings it back after it was marked for deletion",
        "service/holdfast_service/catalog/reread.py",
        "if copy.leased_until != claimed.leased_until or copy.state not in _THERE:",
        "if copy.leased_until != claimed.leased_until:",
        ("tests/service/test_scrub.py",),
    ),
    Guard(
        "protocol-28",
        "two workers copy the same chunk",
        "service/holdfast_service/catalog/copying.py",
        "select(Chunk).where(Chunk.id == chunk_id).with_for_update()",
        "select(Chunk).where(Chunk.id == chunk_id)",
        ("tests/service/test_protocol_copies.py",),
    ),
    Guard(
        "protocol-28",
        "a worker that lost its lease settles the copy",
        "service/holdfast_service/catalog/copying.py",
        "Copy.state == CopyState.COPYING, Copy.leased_until == task.leased_until)",
        "Copy.state == CopyState.COPYING)",
        ("tests/service/test_protocol_copies.py",),
    ),
    Guard(
        "protocol-28",
        "what a rotten source gives is written to the second store",
        "service/holdfast_service/catalog/copying.py",
        "    if digest.hexdigest() != task.digest:\n",
        "    if False:\n",
        ("tests/service/test_protocol_copies.py",),
    ),
    Guard(
        "protocol-34",
        "readers are sent to a store that does not answer, though another has the chunk",
        "service/holdfast_service/restore/choose_copies.py",
        "            not attached.watch.away,\n",
        "            True,\n",
        ("tests/service/test_protocol_copies.py",),
    ),
    Guard(
        "protocol-20",
        "a run without a restore point begins from nothing, whatever was committed in it",
        "trainer_sdk/holdfast/restore.py",
        "if decision.ever_committed or at is not None:",
        "if at is not None:",
        ("tests/trainer/test_refusals.py",),
    ),
    Guard(
        "protocol-29",
        "what moves to the trash or is purged does not ask for holds",
        "service/holdfast_service/retention/in_force.py",
        "return or_(is_held(session), is_pinned(session), is_being_read(session))",
        "return or_(is_pinned(session), is_being_read(session))",
        ("tests/service/test_protocol_holds.py",),
    ),
    Guard(
        "protocol-29",
        "a hold is placed without the checkpoint's lock",
        "service/holdfast_service/holds/view.py",
        "select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(),",
        "select(Checkpoint).where(Checkpoint.id == checkpoint_id),",
        ("tests/service/test_protocol_holds.py",),
    ),
    Guard(
        "protocol-29",
        "who has placed a hold can release it",
        "service/holdfast_service/holds/release.py",
        "    if why is None:",
        "    if True:",
        ("tests/service/test_holds.py",),
    ),
    Guard(
        "protocol-29",
        "the collector deletes what the store was told to hold",
        "service/holdfast_service/collect/garbage.py",
        "            store_lets_go(),\n",
        "",
        ("tests/service/test_hold_mirror.py",),
    ),
    Guard(
        "protocol-29",
        "the store is told of a hold before the catalog says so",
        "service/holdfast_service/holds/mirror.py",
        "copy.lock, copy.leased_until = CopyLock.CHANGING, now + _LEASE",
        "copy.leased_until = now + _LEASE",
        ("tests/service/test_hold_mirror.py",),
    ),
    Guard(
        "protocol-29",
        "a bucket with a default retention is taken",
        "service/holdfast_service/stores/s3.py",
        "        self.refuse_default_retention()\n",
        "",
        ("tests/service/test_hold_mirror.py",),
    ),
    Guard(
        "protocol-21",
        "a purge does not look for readers again under the checkpoint's lock",
        "service/holdfast_service/retention/purge.py",
        ".where(Checkpoint.id == checkpoint_id, _is_due(session, pressure), ~must_stay(session)),",
        ".where(Checkpoint.id == checkpoint_id, _is_due(session, pressure)),",
        ("tests/service/test_protocol_trash.py",),
    ),
    Guard(
        "protocol-26",
        "the two newest healthy points have no protection",
        "service/holdfast_service/retention/protect.py",
        "return [*on_line, *beside][:HEALTHY_POINTS]",
        "return []",
        ("tests/service/test_protocol_trash.py", "tests/unit/test_retention_plan.py"),
    ),
    Guard(
        "protocol-26",
        "what is taken back does not look whether the step was saved anew",
        "service/holdfast_service/retention/undelete.py",
        "    if anew is not None:",
        "    if False:",
        ("tests/service/test_protocol_trash.py",),
    ),
    Guard(
        "protocol-27",
        "what was changed between the plan and the checkpoint's lock expires all the same",
        "service/holdfast_service/retention/trash.py",
        "if row.version == versions[row.id]}",
        "}",
        ("tests/service/test_protocol_retention.py",),
    ),
    Guard(
        "protocol-27",
        "a plan is applied without the run's lock",
        "service/holdfast_service/retention/trash.py",
        "select(Run).where(Run.id == run_id).with_for_update(),",
        "select(Run).where(Run.id == run_id),",
        ("tests/service/test_protocol_retention.py",),
    ),
    Guard(
        "protocol-27",
        "a plan is applied whatever the policy is by now",
        "service/holdfast_service/retention/apply.py",
        "if policy is None or policy_digest(policy) != request.policy_digest:",
        "if policy is None:",
        ("tests/service/test_protocol_retention.py",),
    ),
    Guard(
        "protocol-5",
        "a store is deleted from whatever its marker says",
        "service/holdfast_service/collect/ready.py",
        "    if allowed:",
        "    if True:",
        ("tests/service/test_protocol_collect.py", "tests/service/test_sweep.py"),
    ),
    Guard(
        "protocol-5",
        "a sweep does not ask whether the store has newer records than the catalog",
        "service/holdfast_service/collect/sweep.py",
        "        findings.stopped = _why_older(attached, findings) or findings.stopped\n",
        "",
        ("tests/service/test_restored_in_place.py",),
    ),
    Guard(
        "protocol-5",
        "the collector does not ask whether the store has newer records than the catalog",
        "service/holdfast_service/collect/ready.py",
        "why_not(context, attached) or _why_older(attached)",
        "why_not(context, attached)",
        ("tests/service/test_restored_in_place.py",),
    ),
    Guard(
        "protocol-10",
        "the commit does not look again whether every chunk can be relied on",
        "service/holdfast_service/commit/complete.py",
        "    if lost:",
        "    if False:",
        ("tests/service/test_protocol_commit.py", "tests/service/test_protocol_commit_races.py"),
    ),
    Guard(
        "protocol-24",
        "the collector does not lock the chunks that it asks about",
        "service/holdfast_service/collect/mark.py",
        "order_by(Chunk.digest).with_for_update(skip_locked=True)",
        "order_by(Chunk.digest)",
        ("tests/service/test_protocol_collect.py",),
    ),
    Guard(
        "protocol-24",
        "what an upload relies on is collected under it",
        "service/holdfast_service/collect/garbage.py",
        "            ~relied_on_by_an_upload(),\n",
        "",
        ("tests/service/test_protocol_collect.py", "tests/service/test_collect_races.py"),
    ),
    Guard(
        "protocol-24",
        "the sealed shards of an open checkpoint do not count",
        "service/holdfast_service/collect/garbage.py",
        "LIVE = (CheckpointState.UPLOADING, ",
        "LIVE = (",
        ("tests/service/test_protocol_collect.py",),
    ),
    Guard(
        "protocol-24",
        "a copy goes while another of its chunk is read again",
        "service/holdfast_service/collect/garbage.py",
        "            ~self.worked_on(),\n",
        "",
        ("tests/service/test_collect_races.py",),
    ),
    Guard(
        "protocol-24",
        "what may go is not asked again behind the lock",
        "service/holdfast_service/collect/mark.py",
        "Copy.chunk_id.in_(locked) & question.may_go()",
        'Copy.chunk_id.in_(locked) & Copy.state.in_(["verified"])',
        ("tests/service/test_protocol_collect.py", "tests/service/test_collect_races.py"),
    ),
    Guard(
        "protocol-24",
        "the marks that a dead collector left are forgotten",
        "service/holdfast_service/collect/mark.py",
        "over = or_(Copy.leased_until.is_(None), Copy.leased_until < question.now)",
        "over = Copy.leased_until.is_(None)",
        ("tests/service/test_protocol_collect.py", "tests/service/test_collect_races.py"),
    ),
    Guard(
        "protocol-25",
        "a pending copy goes while its ticket can still be used",
        "service/holdfast_service/collect/garbage.py",
        "            self.waited_out(),\n",
        "",
        ("tests/service/test_protocol_collect.py", "tests/service/test_collect_races.py"),
    ),
    Guard(
        "protocol-25",
        "an orphan is deleted however young it is",
        "service/holdfast_service/collect/sweep.py",
        "if each.modified_at < oldest",
        "if True",
        ("tests/service/test_sweep.py",),
    ),
    Guard(
        "protocol-25",
        "a sweep does not ask the catalog again before it deletes",
        "service/holdfast_service/collect/sweep.py",
        "unknown = unknown_of(context, attached.store_id, batch)",
        "unknown = list(batch)",
        ("tests/service/test_sweep.py",),
    ),
    Guard(
        "protocol-25",
        "a sweep deletes however much it is",
        "service/holdfast_service/collect/breaker.py",
        "    if not many and not large:",
        "    if True:",
        ("tests/service/test_sweep.py", "tests/unit/test_breaker.py"),
    ),
    Guard(
        "protocol-26",
        "what is in the trash is collected",
        "service/holdfast_service/collect/garbage.py",
        "CheckpointState.TRASHED, CheckpointState.DELETING)",
        "CheckpointState.DELETING)",
        ("tests/service/test_protocol_collect.py", "tests/service/test_collect_races.py"),
    ),
    Guard(
        "protocol-29",
        "the collector marks what its store may hold",
        "service/holdfast_service/collect/garbage.py",
        "            store_lets_go(),\n",
        "",
        ("tests/service/test_collect_races.py",),
    ),
    Guard(
        "protocol-29",
        "a hold keeps no chunk of what another part calls deleted",
        "service/holdfast_service/collect/garbage.py",
        "or_(Checkpoint.state.in_(LIVE), is_held(self.session)),",
        "Checkpoint.state.in_(LIVE),",
        ("tests/service/test_collect_races.py",),
    ),
    Guard(
        "protocol-5",
        "a store lets itself be changed whatever its marker says",
        "service/holdfast_service/catalog/ownership.py",
        "        if marker.epoch != self._epoch:",
        "        if False:",
        ("tests/service/test_catalog_check.py",),
    ),
    Guard(
        "protocol-5",
        "a copy of the database is taken for the catalog itself",
        "service/holdfast_service/catalog/ownership.py",
        "        if identity.place is not None and self._place is not None and identity.place != self._place:",
        "        if False:",
        ("tests/service/test_catalog_check.py",),
    ),
    Guard(
        "protocol-5",
        "a store is adopted over what the catalog does not know",
        "service/holdfast_service/catalog/epoch.py",
        "        if not row.checked_whole and not accept_loss:",
        "        if False:",
        ("tests/service/test_catalog_check.py",),
    ),
    Guard(
        "protocol-30",
        "a record keeps its name when it changes, so that a late writer puts an older state in its place",
        "service/holdfast_service/catalog/record_names.py",
        'f"{self.folder}/{epoch:06d}.{version:010d}.json"',
        'f"{self.folder}/{epoch:06d}.{1:010d}.json"',
        ("tests/service/test_commit_records.py",),
    ),
    Guard(
        "protocol-30",
        "a purge leaves no word behind, and a late writer raises the dead",
        "service/holdfast_service/rebuild/run.py",
        "        elif each.removed:",
        "        elif False:",
        ("tests/service/test_commit_records.py",),
    ),
    Guard(
        "protocol-30",
        "a record's manifest is written before its lists",
        "service/holdfast_service/catalog/record_writing.py",
        "    for list_id, digest in lists:",
        "    _write(task, task.subject.manifest_name, encode(manifest))\n    for list_id, digest in lists:",
        ("tests/service/test_commit_records.py",),
    ),
    Guard(
        "protocol-30",
        "chunks go before the record is gone from every store",
        "service/holdfast_service/collect/garbage.py",
        ", CheckpointState.DELETING)",
        ")",
        ("tests/service/test_collect_races.py",),
    ),
    Guard(
        "protocol-15",
        "a chunk gets cold that an upload was told of as present",
        "service/holdfast_service/tiers/movable.py",
        "uses = [negotiated, _used_by(Checkpoint.state == CheckpointState.UPLOADING)]",
        "uses = [Chunk.id < 0]",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-15",
        "a chunk is as cold as its coldest user",
        "service/holdfast_service/tiers/movable.py",
        "or_(Checkpoint.tier_wanted.is_(None), Checkpoint.tier_wanted.not_in(at_least)),",
        "Checkpoint.id.is_(None),",
        ("tests/service/test_tiers.py",),
    ),
    Guard(
        "protocol-21",
        "a reader's lease is not waited for before its chunks get cold",
        "service/holdfast_service/tiers/retire.py",
        "    lock_users(session, *chunk_ids)\n",
        "",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-21",
        "a hot copy goes before the last issued URL has run out",
        "service/holdfast_service/tiers/retire.py",
        "copy.leased_until = outlived_at",
        "copy.leased_until = None",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-21",
        "what is thawed stays a restore point when its time is over",
        "service/holdfast_service/catalog/restore_choice.py",
        "return Tier.COLD if row.tier == Tier.HOT and over else Tier(row.tier)",
        "return Tier(row.tier)",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-28",
        "what the store says of its copy is not looked at",
        "service/holdfast_service/tiers/move.py",
        "if found != (place.storage_class, task.stored_bytes, stored_digest):",
        "if False:",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-28",
        "the last good copy of a chunk is taken away",
        "service/holdfast_service/tiers/movable.py",
        "exists().where(other.chunk_id == Copy.chunk_id, other.id != Copy.id, place.holds(other)),",
        "Copy.id > 0,",
        ("tests/service/test_protocol_tiers.py",),
    ),
    Guard(
        "protocol-29",
        "a hot copy that the store holds locked is taken away",
        "service/holdfast_service/tiers/movable.py",
        "        store_lets_go(),\n",
        "",
        ("tests/service/test_tiers.py",),
    ),
    Guard(
        "training-1",
        "asking an optimizer for its state steps it, as torch's get_state_dict does",
        "trainer_sdk/holdfast/state/optimizers.py",
        "    names = parameter_names(optimizer, known)\n    groups = []",
        "    optimizer.step()\n    names = parameter_names(optimizer, known)\n    groups = []",
        ("tests/trainer/test_save_and_resume.py", "tests/trainer/test_state_capture.py"),
    ),
    Guard(
        "protocol-31",
        "workers give up what the ranks could not call for, while no process served",
        "service/holdfast_service/reap/downtime.py",
        "if served_at is not None and now - served_at > SILENT_AFTER:",
        "if False:",
        ("tests/service/test_reap.py",),
    ),
    Guard(
        "protocol-31",
        "an attempt is lost for a silence in which nobody could have heard it",
        "service/holdfast_service/reap/tick.py",
        "            func.coalesce(Attempt.excused_until, Attempt.opened_at) < silent_since,\n",
        "",
        ("tests/service/test_attend.py",),
    ),
    Guard(
        "training-2",
        "tuples become lists, as in plain JSON",
        "trainer_sdk/holdfast/state/tree.py",
        "if kind is list:",
        "if kind in (list, tuple):",
        ("tests/unit/test_tree.py", "tests/trainer/test_save_and_resume.py"),
    ),
    Guard(
        "training-3",
        "a loader takes one rank's position for all, though they were at several",
        "trainer_sdk/holdfast/data/sampler.py",
        "if any(state != states[0] for state in states):",
        "if False:",
        ("tests/trainer/test_resumable_data.py",),
    ),
    Guard(
        "training-4",
        "making a loader's iterator draws from the global generator",
        "trainer_sdk/holdfast/data/loader.py",
        "loader.generator = torch.Generator()",
        "loader.generator = torch.default_generator",
        ("tests/trainer/test_resumable_data.py",),
    ),
    Guard(
        "training-5",
        "a verification calls launches equal that differ",
        "trainer_sdk/holdfast/verify/evidence.py",
        "        if found:\n",
        "        if False:\n",
        ("tests/unit/test_verify_diagnosis.py",),
    ),
    Guard(
        "training-5",
        "stages that share an optimizer's name are saved, and could not be restored",
        "trainer_sdk/holdfast/state/replicas.py",
        "            if names != known:\n",
        "            if False:\n",
        ("tests/trainer/test_parts_of_ranks.py",),
    ),
    Guard(
        "training-5",
        "a verification that compared nothing of the training says exact",
        "trainer_sdk/holdfast/verify/verification.py",
        "Verdict.EXACT if saw_training(straight, comparison) else Verdict.NOTHING_SEEN",
        "Verdict.EXACT",
        ("tests/unit/test_verify_diagnosis.py",),
    ),
    Guard(
        "training-10",
        "each rank decides alone whether a candidate could be read",
        "trainer_sdk/holdfast/ranks.py",
        "in enumerate(self.gather(outcome)):",
        "in enumerate([outcome]):",
        ("tests/trainer/test_ranks.py", "tests/trainer/test_damaged_checkpoints.py"),
    ),
    Guard(
        "training-11",
        "a rank saves by itself what all had put off",
        "trainer_sdk/holdfast/when/schedule.py",
        "if self._put_off and self._alone and not self._busy() else None",
        "if self._put_off and not self._busy() else None",
        ("tests/unit/test_when.py",),
    ),
    Guard(
        "training-11",
        "every metric is read at every step",
        "trainer_sdk/holdfast/when/schedule.py",
        "if best.policy.metric in metrics]",
        "if [float(each) for each in metrics.values()] and best.policy.metric in metrics]",
        ("tests/unit/test_when.py",),
    ),
    Guard(
        "training-11",
        "a rank tells how far it has come before it holds its next step up",
        "trainer_sdk/holdfast/ranks_agreement.py",
        "self._held = self._held or threading.Event()",
        "pass",
        ("tests/unit/test_agreement.py",),
    ),
    Guard(
        "training-13",
        "signals are seen by a Python handler only",
        "trainer_sdk/holdfast/preemption/signals.py",
        "self._earlier_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)",
        "pass",
        ("tests/unit/test_preemption_signals.py",),
    ),
    Guard(
        "training-13",
        "a forked child keeps what watches the signals of its parent",
        "trainer_sdk/holdfast/preemption/signals.py",
        "        watch.forget_in_child()",
        "        pass",
        ("tests/unit/test_preemption_signals.py",),
    ),
    Guard(
        "training-16",
        "a save in flight is given up though the new one cannot be finished either",
        "trainer_sdk/holdfast/preemption/estimate.py",
        "Choice.SUPERSEDE if new_seconds * _SAFETY <= left else Choice.IN_FLIGHT",
        "Choice.SUPERSEDE",
        ("tests/unit/test_preemption_estimate.py",),
    ),
    Guard(
        "training-14",
        "a preempted job ends with its launcher's own code",
        "client/holdfast_client/cli/run/ending.py",
        "if outcome is AttemptOutcome.PREEMPTED:",
        "if False:",
        ("tests/unit/test_run_ending.py",),
    ),
    Guard(
        "training-14",
        "SIGUSR1 reaches torchrun's agent as it came",
        "client/holdfast_client/cli/run/launcher.py",
        "if not torchrun or number in",
        "if number or number in",
        ("tests/unit/test_run_ending.py",),
    ),
    Guard(
        "training-14",
        "who was fenced tells the launch around it that it has failed, and is started again",
        "trainer_sdk/holdfast/session.py",
        "                outcome = AttemptOutcome.FENCED\n",
        "                pass\n",
        ("tests/trainer/test_outcome_notes.py",),
    ),
    Guard(
        "training-14",
        "an attempt that has only ended counts as fenced, and is never launched again",
        "client/holdfast_client/errors.py",
        'return "latest_attempt" in self.context',
        "return True",
        ("tests/trainer/test_outcome_notes.py",),
    ),
    Guard(
        "training-15",
        "restarted ranks share the store of torchrun's agent",
        "client/holdfast_client/cli/run/launcher.py",
        '        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",\n',
        "",
        ("tests/unit/test_run_ending.py",),
    ),
    Guard(
        "training-18",
        "a CheckpointIO is taken where Lightning asks it on one rank only, or never",
        "trainer_sdk/holdfast/integrations/lightning/callback.py",
        "if ignores_it or trainer.world_size > 1:",
        "if False:",
        ("tests/trainer/test_lightning.py",),
    ),
    Guard(
        "training-18",
        "Trainer's progress is restored, and its model and optimizer are not",
        "trainer_sdk/holdfast/integrations/hf.py",
        "step = self.checkpointer.restore(self._training_state()) - 1",
        "step = self._resume.step",
        ("tests/trainer/test_hf.py",),
    ),
)


def copy_tree(target: Path) -> None:
    """The committed tree, without its history."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)


def failing_tests(tree: Path, tests: tuple[str, ...], rule: str) -> list[str]:
    """Names of the rule's tests that fail in `tree`. Raises RuntimeError where none could be run at all."""
    # In front of the editable install: the processes that the tests start must run the copy too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES)}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += ["--rule", rule, "--timeout=150", *tests]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def prove(guard: Guard) -> bool:
    with tempfile.TemporaryDirectory(prefix="holdfast-guard-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        path = tree / guard.path
        source = path.read_text(encoding="utf-8")
        if guard.text not in source:
            print(f"{guard.rule:<12} ERROR: {guard.path} no longer has the guard's text: {guard.text.strip()!r}")
            return False
        if broken := failing_tests(tree, guard.tests, guard.rule):
            print(f"{guard.rule:<12} ERROR: fails with its guard in place: {broken}")
            return False
        path.write_text(source.replace(guard.text, guard.without), encoding="utf-8")
        failing = failing_tests(tree, guard.tests, guard.rule)
    verdict = f"{len(failing)} of its tests fail" if failing else "NOT DEFENDED: every test still passes"
    print(f"{guard.rule:<12} {guard.what}: {verdict}", flush=True)
    for name in failing[:3]:
        print(f"{'':<12}   {name}", flush=True)
    return bool(failing)


def main(rules: list[str]) -> int:
    chosen = [guard for guard in GUARDS if not rules or guard.rule in rules]
    defended = [prove(guard) for guard in chosen]
    print(f"{sum(defended)} of {len(chosen)} guards are defended")
    return 0 if chosen and all(defended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
