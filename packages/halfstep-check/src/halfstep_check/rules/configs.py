"""Rules about configs: conflicts between files, values without effect, words that mean something else."""

from __future__ import annotations

from halfstep_check.findings import Severity
from halfstep_check.rules.rule import Rule

CONFIG_RULES = (
    Rule(
        name="precision-conflict",
        severity=Severity.ERROR,
        title="two sources ask for different precisions",
        why="One of them wins in silence, or the launcher refuses. The other file then describes a run that never "
        "happened: a report can claim bf16 while fp16 ran.",
        fix="State the precision in one place and leave it out of the others.",
        bad="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16
            # train.py
            accelerator = Accelerator(mixed_precision="fp16")
        """,
        good="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16
            # train.py
            accelerator = Accelerator()
        """,
        threads=(
            "huggingface/transformers#39849",
            "shibing624/MedicalGPT#288",
            "huggingface/accelerate#3197",
            "huggingface/transformers#32622",
            "huggingface/diffusers#1272",
            "EleutherAI/gpt-neox#1428",
        ),
    ),
    Rule(
        name="clip-conflict",
        severity=Severity.WARNING,
        title="two sources ask for different gradient clipping",
        why="Only one value is applied, or both are, one after the other. The loss curve then depends on which file "
        "was edited last.",
        fix='State the limit in one place; DeepSpeed takes "auto".',
        bad="""
            # trainer.yaml
            trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5}
        """,
        good="""
            # trainer.yaml
            trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
        """,
    ),
    Rule(
        name="clip-two-layers",
        severity=Severity.WARNING,
        title="a framework and the script both clip",
        why="The gradients are limited twice, and the norm that is logged is that of the second. Changing "
        "one value then changes less than expected, or nothing.",
        fix="Leave clipping to the framework, or switch it off there.",
        bad="""
            # trainer.yaml
            trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}
            # train.py
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        good="""
            # trainer.yaml
            trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}
            # train.py
            trainer.fit(model)
        """,
    ),
    Rule(
        name="accumulation-conflict",
        severity=Severity.ERROR,
        title="two sources ask for different accumulation",
        why="The effective batch, and with it the right learning rate, differs from what one of the files says.",
        fix='State it in the training arguments, and "auto" in DeepSpeed\'s JSON.',
        bad="""
            # args.json
            {"output_dir": "out", "gradient_accumulation_steps": 8}
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
        """,
        good="""
            # args.json
            {"output_dir": "out", "gradient_accumulation_steps": 8}
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        """,
    ),
    Rule(
        name="batch-conflict",
        severity=Severity.ERROR,
        title="two sources ask for different batch sizes",
        why="One of them is not what runs; learning rate and schedule were tuned for the other.",
        fix='State it in the training arguments, and "auto" in DeepSpeed\'s JSON.',
        bad="""
            # args.json
            {"output_dir": "out", "per_device_train_batch_size": 4}
            # ds.json
            {"train_micro_batch_size_per_gpu": 32}
        """,
        good="""
            # args.json
            {"output_dir": "out", "per_device_train_batch_size": 4}
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto"}
        """,
    ),
    Rule(
        name="batch-arithmetic",
        severity=Severity.ERROR,
        title="the global batch is not micro batch × accumulation × processes",
        why="DeepSpeed stops with an assertion; elsewhere the effective batch is not the one that is written down.",
        fix="Correct the product, or leave the global batch out.",
        bad="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            num_processes: 4
            # ds.json
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
        """,
        good="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            num_processes: 4
            # ds.json
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
        """,
    ),
    Rule(
        name="two-precisions",
        severity=Severity.ERROR,
        title="one source switches two precisions on",
        why="The framework stops, or picks one by an order that no file shows.",
        fix="Switch one of them off.",
        bad="""
            # ds.json
            {"fp16": {"enabled": true}, "bf16": {"enabled": true}}
        """,
        good="""
            # ds.json
            {"fp16": {"enabled": true}, "bf16": {"enabled": false}}
        """,
    ),
    Rule(
        name="fp16-without-scaling",
        severity=Severity.ERROR,
        title="fp16 runs without loss scaling",
        why="Gradients below 6e-8 become zero in fp16 and sums overflow at 65504. Without a scaler nothing sees it: "
        "training stalls, or turns NaN. `amp: True, fp16: False` in trainers that build their own Accelerator means "
        "exactly this, whatever accelerate's file says.",
        fix="Switch loss scaling on, or use bf16.",
        bad="""
            # train.yaml
            trainer:
              amp: True
              fp16: False
        """,
        good="""
            # train.yaml
            trainer:
              amp: True
              fp16: True     # fp16 with a GradScaler
        """,
    ),
    Rule(
        name="scaling-with-bf16",
        severity=Severity.WARNING,
        title="loss scaling is configured for bf16",
        why="bf16 has the range of fp32, so nothing underflows that scaling could save. Older DeepSpeed "
        "drops the keys, 0.17 refuses the config; readers expect overflow handling that does not exist.",
        fix="Delete the loss-scale keys.",
        bad="""
            # ds.json
            {"bf16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}}
        """,
        good="""
            # ds.json
            {"bf16": {"enabled": true}}
        """,
        threads=("h2oai/h2o-llmstudio#1063", "microsoft/superbenchmark#796"),
    ),
    Rule(
        name="ignored-key",
        severity=Severity.WARNING,
        title="a key has no effect",
        why="It reads like a setting and is none: the run is not what the file says.",
        fix="Delete the key, or set what makes it count.",
        bad="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16
            fsdp_config: {fsdp_offload_params: true}
        """,
        good="""
            # accelerate.yaml
            distributed_type: FSDP
            mixed_precision: bf16
            fsdp_config: {fsdp_offload_params: true}
        """,
        threads=("EleutherAI/gpt-neox#1428",),
    ),
    Rule(
        name="launch-refused",
        severity=Severity.ERROR,
        title="the launcher or the Trainer refuses to start",
        why="The framework compares its files and stops with a ValueError. Here it costs a second, there a queue.",
        fix="Keep the precision in DeepSpeed's JSON alone.",
        bad="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            mixed_precision: fp16
            deepspeed_config: {deepspeed_config_file: ds.json}
            # ds.json
            {"fp16": {"enabled": true}}
        """,
        good="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            deepspeed_config: {deepspeed_config_file: ds.json}
            # ds.json
            {"fp16": {"enabled": true}}
        """,
        threads=("huggingface/transformers#39849",),
    ),
    Rule(
        name="unknown-value",
        severity=Severity.ERROR,
        title="the framework, or the version pinned, does not know this value",
        why="`bf16-mixed` is Lightning 2's word and an error under 1.x; `apex` names a backend that no longer exists.",
        fix="Use a value of the version that is installed.",
        bad="""
            # requirements.txt
            pytorch-lightning==1.9.5
            # train.yaml
            trainer: {precision: bf16-mixed}
        """,
        good="""
            # requirements.txt
            pytorch-lightning==1.9.5
            # train.yaml
            trainer: {precision: bf16}
        """,
        threads=("huggingface/transformers#41134", "huggingface/transformers#41404"),
    ),
    Rule(
        name="deepspeed-bf16-weights",
        severity=Severity.INFO,
        title="DeepSpeed bf16 stores the weights in bf16",
        why="It is not autocast: parameters and gradients are bf16, an fp32 master copy takes the updates. Losses, "
        "norms and embeddings that autocast would keep in fp32 are computed in bf16. One thread measured SQuAD F1 74.7 "
        "against 85.5 in fp32.",
        fix="Use torch_autocast where fp32 weights are wanted.",
        bad="""
            # ds.json
            {"bf16": {"enabled": true}}
        """,
        good="""
            # ds.json
            {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}
        """,
        threads=("deepspeedai/DeepSpeed#4904", "Lightning-AI/pytorch-lightning#18016"),
    ),
    Rule(
        name="autocast-around-deepspeed",
        severity=Severity.WARNING,
        title="the script opens autocast around a DeepSpeed engine",
        why="DeepSpeed casts weights or uses its own torch_autocast. From 0.17.2 an autocast block from outside stops "
        "the run, later versions ignore it with a message; either way it does not do what the script says.",
        fix="Remove the block, and let the engine run autocast itself.",
        bad="""
            # ds.json
            {"fp16": {"enabled": true}}
            # train.py
            import deepspeed
            import torch

            with torch.autocast("cuda", dtype=torch.float16):
                loss = engine(batch)
        """,
        good="""
            # ds.json
            {"torch_autocast": {"enabled": true, "dtype": "float16"}}
            # train.py
            import deepspeed

            loss = engine(batch)
        """,
        threads=("deepspeedai/DeepSpeed#7529", "deepspeedai/DeepSpeed#7543", "wenet-e2e/wenet#2788"),
    ),
    Rule(
        name="low-precision-reduce",
        severity=Severity.INFO,
        title="gradients are summed across GPUs in half precision",
        why="bf16 keeps 8 significant bits: sums over many ranks lose the small contributions, and runs destabilise at "
        "scale. Frameworks set the reduction dtype from the precision string without saying so.",
        fix="Set the reduction dtype to fp32.",
        bad="""
            # train.py
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        """,
        good="""
            # train.py
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        """,
        threads=(
            "pytorch/pytorch#106395",
            "Lightning-AI/pytorch-lightning#17506",
            "Lightning-AI/pytorch-lightning#18717",
        ),
    ),
    Rule(
        name="half-weights",
        severity=Severity.INFO,
        title="the weights themselves are stored in half precision",
        why="An update smaller than 1/256 of a bf16 weight (1/2048 in fp16) is rounded away. Without an fp32 copy the "
        "model stops learning while the loss still looks alive.",
        fix="Use mixed precision, which keeps fp32 weights, unless memory forbids it.",
        bad="""
            # train.yaml
            trainer: {precision: bf16-true}
        """,
        good="""
            # train.yaml
            trainer: {precision: bf16-mixed}
        """,
        threads=("pytorch/torchtune#2254", "Lightning-AI/litgpt#882"),
    ),
    Rule(
        name="tf32-off",
        severity=Severity.INFO,
        title="TF32 is switched off",
        why="fp32 matmuls then run without tensor cores, several times slower on Ampere and newer. Right for a strict "
        "baseline, costly by accident.",
        fix="Switch it on, unless strict fp32 is what you want.",
        bad="""
            # args.json
            {"output_dir": "out", "tf32": false}
        """,
        good="""
            # args.json
            {"output_dir": "out", "tf32": true}
        """,
        threads=("pytorch/pytorch#153195",),
    ),
    Rule(
        name="auto-unfilled",
        severity=Severity.WARNING,
        title="`auto` in a DeepSpeed config that nothing fills",
        why="`auto` is a word of Accelerate and the HF Trainer. deepspeed.initialize reads it as text and fails.",
        fix="Write the value, or start through accelerate or the HF Trainer.",
        bad="""
            # ds.json
            {"train_micro_batch_size_per_gpu": "auto"}
            # train.py
            import deepspeed
        """,
        good="""
            # ds.json
            {"train_micro_batch_size_per_gpu": 8}
            # train.py
            import deepspeed
        """,
    ),
    Rule(
        name="missing-file",
        severity=Severity.INFO,
        title="a config names a file that is not there",
        why="Frameworks look from the working directory of the launch. A path that is right on the cluster can be "
        "wrong here; then nothing inside that file was compared.",
        fix="Correct the path, or name the file on the command line.",
        bad="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            deepspeed_config: {deepspeed_config_file: ds_zero2.json}
            # ds_z2.json
            {"fp16": {"enabled": true}}
        """,
        good="""
            # accelerate.yaml
            distributed_type: DEEPSPEED
            deepspeed_config: {deepspeed_config_file: ds_z2.json}
            # ds_z2.json
            {"fp16": {"enabled": true}}
        """,
    ),
    Rule(
        name="hardware-lacks",
        severity=Severity.ERROR,
        title="the device does not have this format",
        why="The run stops at the first matmul, or falls back to another format.",
        fix="Use a format that the device has.",
        bad="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: fp8   # with --gpu a100
        """,
        good="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16   # with --gpu a100
        """,
    ),
    Rule(
        name="hardware-emulates",
        severity=Severity.WARNING,
        title="the device only emulates this format",
        why="is_bf16_supported() says yes on a T4 and a V100, but the work is done in fp32 with extra casts: slower "
        "than fp32, and convolutions may find no kernel.",
        fix="Use fp16 with loss scaling on GPUs before Ampere.",
        bad="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16   # with --gpu t4
        """,
        good="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: fp16   # with --gpu t4
        """,
        threads=("pytorch/pytorch#148322", "karpathy/nanoGPT#277"),
    ),
    Rule(
        name="unknown-ignore",
        severity=Severity.INFO,
        title="an ignore comment names no rule",
        why="A misspelled name, or one of a rule that no longer exists, silences nothing.",
        fix="Correct the name; halfstep-check --explain all lists the rules.",
        bad="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16  # halfstep: ignore[precision-conflicts]
        """,
        good="""
            # accelerate.yaml
            distributed_type: MULTI_GPU
            mixed_precision: bf16  # halfstep: ignore[precision-conflict]
        """,
    ),
)
