"""hs.Step: the guarded step in a user's training loop. docs/own_loop.md is its guide.

    step.py               hs.Step and its outcomes, rollback
    arguments.py          validate and normalise its arguments
    loss.py               checks of the user's loss function and of what it writes into
    schedule_argument.py  schedules of users' loops, and their schedulers, which follow

Captured steps are in `halfstep.fast`.

Resume (docs/resume.md): data_position.py, save_and_load.py. Capsules, replay and ledger: evidence.py.
"""
