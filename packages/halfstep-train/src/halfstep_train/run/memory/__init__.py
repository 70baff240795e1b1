"""Fit a run into memory: by prediction before it starts, by trials, by halving during training.

When each is used:

    prediction   before anything runs: `halfstep plan --memory`, the micro-batch that `train.auto_batch` starts with on
                 GPUs, the order in which `train.memory=low` tries its levers, and the settings that an
                 out-of-memory message suggests
    trial        before the first step, where a prediction is not enough: `train.memory=low` measures each lever (in
                 tune/)
    halving      during training on one rank: when a step runs out of memory, the engine first drops captured graphs,
                 then halves the micro-batch if `train.auto_batch` is on, else stops with suggestions. Several ranks
                 always stop, because the others are in the middle of the same step

How a prediction is made, one file per stage:

    traceable_step.py   build the run's step on tensors without content, as a GPU would run it
    step_trace.py       record its operations and allocations; sum them up over the step
    compiled.py         derive from the eager trace what torch.compile keeps, recomputes and fuses
    planner.py          peak by component for a precision, mode, level and batch; what fits a device
    sizing.py           use the prediction: micro-batch, suggestions, costs for `guide`
    out_of_memory.py    cut a window into micro-batches, and explain out-of-memory errors
"""
