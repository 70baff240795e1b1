"""hs.Step: the guarded step in a user's training loop. docs/own_loop.md is its guide.

    step.py               hs.Step and its outcomes, rollback
    arguments.py          validate and normalise its arguments
    loss.py               checks of the user's loss function and of what it writes into
    schedule_argument.py  schedules of users' loops, and their schedulers, which follow

Fast path, in reading order (docs/captured_steps.md):

    fast.py               choose eager, captured or compiled for each step; replay
    windows.py            the traced calls of a window, and what a graph needs of them
    compile_history.py    what compiling took and saved in earlier runs
    hand_rates.py         settings of optimizers that change while graphs are captured
    traced.py             trace a loss function with guards on every Python value it reads
    certificate.py        compare a captured step with uncaptured ones before it is used

Resume (docs/resume.md): data_position.py, save_and_load.py. Capsules, replay and ledger: evidence.py.
"""
