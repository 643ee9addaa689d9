"""Compares our policies with LeRobot's on the same small random checkpoints and inputs: ``make parity``.

LeRobot needs other versions of torch and transformers, so it has an environment of its own. There ``theirs...`` writes
checkpoints, inputs and what LeRobot makes of them; ``ours`` reads them in ``.venv``. ``cases`` is what both know. The other
way round, ``exports`` writes our exports in ``.venv``, and ``theirs..._exports`` loads them there.
"""
