"""How a run fits into memory: predicted before it starts, tried where ranks must agree, halved when it runs out.

Which one decides, and when:

    prediction   before anything runs: `halfstep plan --memory`, the micro-batch that `train.auto_batch` starts with on
                 one GPU, the order in which `train.memory=low` tries its levers, and the settings that an
                 out-of-memory message suggests
    trial        before the first step, where a prediction is not enough: `train.memory=low` measures each lever (in
                 tune/), and several ranks with `train.auto_batch` try micro-batches until one fits on all of them
    halving      during training on one rank: a step that runs out of memory gives up captured graphs first, then cuts
                 the micro-batch in half with `train.auto_batch`, and stops with suggestions without it. Several ranks
                 always stop: the others are in the middle of the same step

How a prediction is made, one file per stage:

    traceable_step.py   build the run's own step on tensors without content, as a GPU would run it
    step_trace.py         record its operations and allocations; sum them up over the step
    compiled.py         derive from the eager trace what torch.compile keeps, recomputes and fuses
    planner.py          peak by component for a precision, mode, level and batch; what fits a device
    sizing.py           what a run does with it: micro-batch, suggestions, costs for `guide` and `bench`
    out_of_memory.py    cutting a window into micro-batches, and the messages
"""
