"""Every write of a training job: attempts, begin, negotiate, seal, commit, abort."""
