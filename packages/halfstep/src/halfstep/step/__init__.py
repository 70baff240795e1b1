"""One guarded optimizer step: compute, judge, commit. A bad step changes nothing.

Follow a training step through these files, in this order:

    own_loop/step.py     hs.Step, one call of the user's loop; in runs: run/engine.py, in eager, compile or graph mode
    step.py              compute: forward and backward over a window, norm, verdict; commit: counters, average, scale
    forward_writes.py    buffers and parameters that forward writes: saved before, put back where the step is bad
    commit.py            how the verdict reaches each optimizer: in its kernel, by selection, or by the host
    facts.py             what the step found: device tensors, sent to the host without a wait
    guard.py             judges those facts two steps later: continue, roll back, or stop
    verdicts.py          does so, for runs, hs.Step and the guards of other trainers

Leaves that these call: batches, clip, scaler, ema, flat (select many tensors at once), signals, refusals, optim/.
Learning rates: schedule.py (functions of the step) and tables.py (those functions as tables on the device).
Around a step: graph.py (as one CUDA graph), phases.py (several networks in turn), ranks.py (several ranks),
step_state.py and snapshots.py (store and restore), randomness.py (seeds and generators).
"""
