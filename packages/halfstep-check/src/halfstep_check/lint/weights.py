"""Weights cast to half and given to an optimizer that expects fp32."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.regions import list_choices, read_format
from halfstep_check.lint.script import (
    WRAPPER,
    Script,
    argument,
    dotted_name,
    is_constant,
    keyword,
    last_name,
    pair_assignments,
)
from halfstep_check.spellings import parse_dtype

PLAIN_OPTIMIZERS = {
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "LBFGS"),
    *("Adafactor", "Adam8bit", "AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "Lion", "Lion8bit"),
}

LIBRARIES = ("torch.optim.", "transformers.", "bitsandbytes.optim.", "lion_pytorch.")

TRAINED_IN_PART = re.compile(
    r"freeze|peft|lora|load_in_[48]bit|deepspeed\."
    r"|deepspeed\s*=|--deepspeed|master_(param|weight|copy|grad)|stochastic_round|kahan",
    re.IGNORECASE,
)
"""Signs that part of a model is frozen, or that fp32 copies are kept."""

ADDS_ADAPTERS = ("get_peft_model", "add_adapter", "inject_adapter_in_model", "inject_trainable_lora")
EVALUATION_WORDS = ("eval", "infer", "test", "predict", "deploy", "export")


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfModel:
    """A model whose weights are stored in half, and what made them so."""

    name: str
    dtype: str
    call: ast.Call
    loaded: bool = False


def find_half_weights(amp: Amp) -> Iterator[Finding]:
    script = amp.script
    optimized = [
        pair for call in script.calls if is_plain_optimizer(amp, call) for pair in list_optimized_models(script, call)
    ]
    optimized += [pair for call in script.calls for pair in list_models_optimized_elsewhere(script, call)]
    # Models that a Trainer is given: it makes the optimizer itself.
    handed = [pair for call in script.calls for pair in list_trained_models(script, call)]
    optimized = [*(optimized if amp.goes_backward or "training_step" in script.named_functions else []), *handed]
    seen: set[tuple[str, str]] = set()
    for model in find_half_models(amp):
        # All names that hold the same weights: FSDP(model), what a builder returns, pipe.unet.
        known = add_wrappers(script, [(model.name, model.call), *list_receiving_names(script, model.call, model.name)])
        partly = is_trained_in_part(script, {name for name, _ in known})
        steps = [
            (name, made) for name, made in optimized for own, where in known if is_same(script, name, made, own, where)
        ]
        # Picking by requires_grad where something is frozen: a frozen half model with trainable fp32 parts is likely,
        # unless all that the optimizer holds is cast afterwards.
        steps = [step for step in steps if not partly or not model.loaded and holds_half(script, step[1], model)]
        if steps and not is_cast_untrained(script, model) and (model.name, model.dtype) not in seen:
            seen.add((model.name, model.dtype))
            found = report_lost_updates(script, model)
            # A Trainer in bf16 is common, and still loses updates.
            mild = model.dtype == "bf16" and {name for name, _ in known} <= {name for name, _ in handed}
            prepared = list_accelerators(amp, {name for name, _ in known})
            if not any(map(shards, prepared)):
                severity = Severity.WARNING if mild else None
                yield dataclasses.replace(found, severity=severity, unless_accelerate_shards=bool(prepared))
    if optimized and (default := find_half_default(script)) is not None:
        yield report_lost_updates(script, default)


def list_accelerators(amp: Amp, models: set[str]) -> list[ast.Call]:
    """Return the calls that make the accelerators whose prepare() takes one of these models."""
    prepares = [call for call in amp.script.calls if getattr(call.func, "attr", "") == "prepare"]
    owners = {
        dotted_name(call.func).removesuffix(".prepare")
        for call in prepares
        if models & {dotted_name(value) for value in call.args}
    }
    made = [value for owner in sorted(owners & amp.accelerators.keys()) for value in amp.script.list_values(owner)]
    return [value for value in made if isinstance(value, ast.Call)]


def shards(accelerator: ast.Call) -> bool:
    """Return whether an Accelerator shards in mixed precision: prepare() then keeps fp32 weights (fsdp_utils.py)."""
    plugged = any(keyword(accelerator, word) is not None for word in ("fsdp_plugin", "deepspeed_plugin"))
    precision = keyword(accelerator, "mixed_precision")
    return plugged and not (isinstance(precision, ast.Constant) and precision.value == "no")


def holds_half(script: Script, made: ast.AST, model: HalfModel) -> bool:
    same = script.owners.get(id(made)) is script.owners.get(id(model.call))
    cast_later = same and getattr(made, "lineno", 0) < model.call.lineno
    added = (c for c in script.calls if last_name(dotted_name(c.func)) in ADDS_ADAPTERS)  # in fp32, to a model in half
    adapted = any(c.lineno > model.call.lineno and not are_opposite(script, c, made) for c in added)
    return cast_later or not adapted and not picks_trained(script, made, model)


def is_cast_untrained(script: Script, model: HalfModel) -> bool:
    """Match a cast under `if not args.train_text_encoder:`, where the model is not trained."""
    branches = [n for n in script.nodes if isinstance(n, ast.If) and isinstance(n.test, ast.UnaryOp)]
    untrained = [n for n in branches if re.match(r"not [\w.]*train", ast.unparse(n.test))]
    return any(model.call in script.walk_below(statement) for n in untrained for statement in n.body)


def are_opposite(script: Script, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in opposite branches of an `if`."""

    def holds(block: list[ast.stmt], node: ast.AST) -> bool:
        return any(node in script.walk_below(statement) for statement in block)

    choices = (n for n in script.nodes if isinstance(n, ast.If))
    return any(holds(n.body, one) and holds(n.orelse, other) for n in choices)


def picks_trained(script: Script, made: ast.AST, model: HalfModel) -> bool:
    """Return whether an optimizer is given what wants a gradient, `filter(lambda p: p.requires_grad, …)`, also by a
    name."""
    named = [v for n in ast.walk(made) if isinstance(n, ast.Name) for v in script.list_values(n.id)]
    each = ".data" in ast.unparse(model.call)  # those that are trained were cast one by one
    return any("requires_grad" in ast.unparse(node) for node in (made, *(named if not each else [])))


def is_same(script: Script, name: str, made: ast.AST, own: str, where: ast.AST) -> bool:
    """Return whether two names are one model: `self.model` is one object in all methods, a plain name only in its own
    function; `self` has all of its own."""
    same = name == own or name == "self" and own.startswith("self.")
    return same and ("." in own or script.share_scope(where, made))


def is_trained_in_part(script: Script, models: set[str]) -> bool:
    """Return whether parts of these models (of any, where none is named) want no gradient, or fp32 copies are kept."""
    frozen: set[str] = set()
    loops = [n for n in script.nodes if isinstance(n, ast.For)]
    for node in script.nodes:
        target = dotted_name(node.targets[0]) if isinstance(node, ast.Assign) else ""
        off = target.endswith(".requires_grad") and isinstance(node, ast.Assign) and not is_constant(node.value, True)
        func = node.func if isinstance(node, ast.Call) else None
        called = isinstance(func, ast.Attribute) and func.attr == "requires_grad_" and "False" in ast.unparse(node)
        if not off and not called:
            continue
        around = {name for loop in loops if node in script.walk_below(loop) for name in list_models(loop.iter)}
        frozen |= around or ({dotted_name(func.value)} if isinstance(func, ast.Attribute) else {"?"})
    hit = any(part == name or part.startswith(f"{name}.") for part in frozen for name in models)
    # Freezing a part, adapters and fp32 copies all mean that half storage may be intended.
    used = re.sub(r"(?m)^\s*(from|import)\s.*", "", script.code)  # an import alone adapts nothing
    return bool(TRAINED_IN_PART.search(used)) or hit or "?" in frozen or not models and bool(frozen)


def report_lost_updates(script: Script, model: HalfModel) -> Finding:
    limit = "1/2048" if model.dtype == "fp16" else "1/256"
    stored = f"{last_name(model.name)} is stored in {model.dtype} and updated in place"
    message = f"{stored}: changes below {limit} of a weight are lost"
    fix = "keep fp32 weights and use autocast, or an optimizer with an fp32 master copy"
    return script.report("half-weights-optimizer", model.call, message, fix=fix)


def find_half_models(amp: Amp) -> list[HalfModel]:
    script = amp.script
    restored = {c: last_name(dotted_name(c.func).removesuffix(".float")) for c in script.calls if is_float_restore(c)}
    # `model.half().float()` rounds the weights once, and leaves them in fp32.
    rounded = {id(c.func.value) for c in restored if isinstance(c.func, ast.Attribute)}
    found: list[HalfModel] = []
    for call in script.calls:
        loaded = get_loaded_dtype(script, call)
        dtype = loaded or get_stored_dtype(call, script)
        if dtype not in ("fp16", "bf16") or not isinstance(call.func, ast.Attribute) or id(call) in rounded:
            continue
        # `self.net = net.half().cuda()`: both names hold it.
        names = {get_assigned_name(amp, call), "" if loaded else dotted_name(call.func.value)} - {""}
        names = names or {name for name, _ in list_receiving_names(script, call, "")}  # `return Net.from_pretrained(…)`
        back = {name for c, name in restored.items() if script.share_scope(c, call)}
        kept = [name for name in sorted(names) if last_name(name) not in back]
        if not is_only_for_evaluation(script, call):
            found += [HalfModel(name=name, dtype=dtype, call=call, loaded=bool(loaded)) for name in kept]
    return [*found, *find_casts_in_loops(script)]


def find_casts_in_loops(script: Script) -> Iterator[HalfModel]:
    """Find `for p in model.parameters(): p.data = p.data.to(torch.bfloat16)` on trained parameters."""
    for loop in (n for n in script.nodes if isinstance(n, ast.For)):
        for node in (n for n in script.walk_below(loop) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)):
            dtype = get_cast_dtype(node.value, script) if isinstance(node.value, ast.Call) else ""
            if (
                dtype in ("fp16", "bf16")
                and dotted_name(node.targets[0]).endswith(".data")
                and isinstance(node.value, ast.Call)
            ):
                frozen = any("requires_grad = False" in ast.unparse(s) for s in list_siblings(script, loop, node))
                yield from (
                    HalfModel(name=m, dtype=dtype, call=node.value) for m in list_models(loop.iter) if not frozen
                )


def list_siblings(script: Script, loop: ast.For, node: ast.stmt) -> list[ast.stmt]:
    blocks = [b for n in script.walk_below(loop) for b in (getattr(n, "body", None), getattr(n, "orelse", None))]
    return next((b for b in blocks if isinstance(b, list) and node in b), [])


def get_stored_dtype(call: ast.Call, script: Script) -> str:
    """Return what `.half()`, `.to(torch.bfloat16)` and a choice between two half formats store."""
    if cast := get_cast_dtype(call, script):
        return cast
    is_to = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
    values = [*call.args, *(item.value for item in call.keywords if item.arg == "dtype")] if is_to else []
    return next(filter(None, (read_half_choice(value, script) for value in values)), "")


def read_half_choice(node: ast.expr | None, script: Script) -> str:
    """Return bf16 of `torch.bfloat16 if supported else torch.float16`, of a table by its default, of a function's
    returns."""
    node = script.read_default(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parse_dtype(node.value) or ""
    given = script.list_values(dotted_name(node)) if not script.is_taken(node) else []
    if len(given) > 1:  # `weight_dtype = torch.float32`, then half where that is asked for
        named = [read_format(value, script) for value in given]
        formats = [
            word or read_half_choice(v, script) if not dotted_name(v) else word
            for v, word in zip(given, named, strict=True)
        ]
        return prefer_half(formats) if all(formats) else ""
    if isinstance(node, ast.IfExp):
        both = [read_format(part, script) for part in (node.body, node.orelse)]
        # `torch.float16 if device == "cuda" else torch.float32`: half wherever it matters, or where it is asked for.
        asked = any(word in ast.unparse(node.test) for word in ("cuda", "device", "gpu", "'bf16'", "'fp16'"))
        return both[0] if set(both) <= {"fp16", "bf16"} or asked and both[1] == "fp32" else ""
    choices = [node] if (entry := get_default_entry(node, script)) is None else [entry]
    formats = [read_format(choice, script) for one in choices for choice in list_choices(one, script)]
    return prefer_half([word for word in formats if word])


def prefer_half(formats: list[str]) -> str:
    """Return what to call a choice among several: half, where it is one of them."""
    return next((word for word in ("bf16", "fp16", *formats) if word in formats), "")


def get_default_entry(node: ast.expr | None, script: Script) -> ast.expr | None:
    """Return the entry of `{"bf16": torch.bfloat16, …}[args.dtype]` that the key's default, or a constant, leads to."""
    getter = node.func if isinstance(node, ast.Call) else None
    looked_up = isinstance(getter, ast.Attribute) and getter.attr == "get" and isinstance(node, ast.Call) and node.args
    owner, key = (getter.value, node.args[0]) if looked_up else (None, None)  # type: ignore[union-attr]
    if isinstance(node, ast.Subscript):
        owner, key = node.value, node.slice
    table, word = script.read_constant(owner), script.read_default(key)
    if not isinstance(table, ast.Dict) or not isinstance(word, ast.Constant):
        return None
    entries = zip(table.keys, table.values, strict=True)
    return next((value for k, value in entries if isinstance(k, ast.Constant) and k.value == word.value), None)


def get_loaded_dtype(script: Script, call: ast.Call) -> str:
    """Return `from_pretrained(…, torch_dtype=torch.bfloat16)` of a model that is trained as a whole."""
    loads = getattr(call.func, "attr", "") in ("from_pretrained", "from_config", "_from_config", "from_single_file")
    if not loads:
        return ""
    return read_half_choice(keyword(call, "torch_dtype") or keyword(call, "dtype"), script)


def find_half_default(script: Script) -> HalfModel | None:
    """Find torch.set_default_dtype(torch.bfloat16) that is never reset: all later parameters are half."""
    setters = ("torch.set_default_dtype", "torch.set_default_tensor_type")
    calls = [call for call in script.calls if script.resolve_name(call.func) in setters and call.args]
    tensors = {"HalfTensor": "fp16", "BFloat16Tensor": "bf16"}
    value = calls[0].args[0] if len(calls) == 1 else None
    word = value.value if isinstance(value, ast.Constant) else dotted_name(value)
    dtype = tensors.get(last_name(str(word)), "") or read_format(value, script)
    if dtype not in ("fp16", "bf16") or is_trained_in_part(script, set()):
        return None
    return HalfModel(name="every new parameter", dtype=dtype, call=calls[0])


def is_plain_optimizer(amp: Amp, call: ast.Call) -> bool:
    """Match `torch.optim.AdamW(…)`, and `optimizer_class(…)` of a name that holds such a class."""
    classes = [call.func, *amp.script.list_values(dotted_name(call.func))]
    return any(is_plain_class(amp.script.resolve_name(arm)) for one in classes for arm in list_choices(one, amp.script))


def is_plain_class(name: str) -> bool:
    return name.startswith(LIBRARIES) and last_name(name) in PLAIN_OPTIMIZERS


def list_optimized_models(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Return names of the models an optimizer steps, also through a list made before and through a function's
    parameter."""
    given = [value for value in (argument(call, 0, "params"),) if value is not None]
    yield from list_given_models(script, given, call)
    owner = script.owners.get(id(call))
    taken = [a.arg for a in owner.args.args if a.arg != "self"] if owner is not None else []
    words = {name.id for value in given for name in ast.walk(value) if isinstance(name, ast.Name)}
    for number, name in enumerate(taken):
        if owner is not None and name in words:
            for use in (c for c in script.calls if last_name(dotted_name(c.func)) == owner.name):
                passed = argument(use, number, name)
                if passed is not None:
                    yield dotted_name(passed), use
                    yield from list_given_models(script, [passed], use)


MAKES_OPTIMIZER = re.compile(r"(get|build|create|make|setup)_optim(izer)?(_v2)?")


def list_models_optimized_elsewhere(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Return `opt = get_optimizer(args, trainable(model))` of another file, stepped here without a scaler."""
    name = last_name(dotted_name(call.func))
    if not MAKES_OPTIMIZER.fullmatch(name) or name in script.local_names or len(call.args) > 2:
        return
    held = [key for key, values in script.assigned.items() if call in values]
    if any(dotted_name(c.func) == f"{key}.step" for key in held for c in script.calls):
        yield from ((dotted_name(n), call) for value in call.args for n in ast.walk(value) if dotted_name(n))


def list_given_models(script: Script, values: list[ast.expr], call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    words = {dotted_name(n) for value in values for n in ast.walk(value)} - {""}
    made = [v for word in sorted(words) for v in script.list_values(word) if script.share_scope(v, call)]
    names = {name for source in (*values, *made) for name in list_models(source)}
    # Groups that a function fills by hand come from the one model it walks over.
    # Parameter groups are often filled by hand in a loop over one model's parameters.
    home = script.owners.get(id(call))
    walked = set(list_models(home)) if home is not None and not names else set()
    yield from ((name, call) for name in sorted(names or (walked if len(walked) == 1 else set())) if name)


def list_trained_models(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Return the model that transformers' or trl's Trainer is given: it makes a plain AdamW for its weights as they
    are."""
    name = script.resolve_name(call.func)
    model = argument(call, 0, "model")
    own = script.class_by_name.get(name)
    bases = [script.resolve_name(base) for base in own.bases] if own is not None else [name]
    if any(base.startswith(("transformers.", "trl.")) and base.endswith("Trainer") for base in bases):
        yield dotted_name(model), call


def list_models(node: ast.AST) -> Iterator[str]:
    """Return `model` of model.parameters(), also inside lists and generators."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr in ("parameters", "named_parameters"):
            yield dotted_name(inner.value)


def is_float_restore(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "float" and not call.args


def get_assigned_name(amp: Amp, call: ast.Call) -> str:
    """Return the name that takes `Net().half()` or `Net().to(device).half()`."""
    for name, values in amp.script.assigned.items():
        if any(call is inner for value in values for inner in walk_chain(value)):
            return name
    return ""


def list_receiving_names(script: Script, call: ast.Call, model: str) -> list[tuple[str, ast.AST]]:
    """Return names that take what a function of this module returns, when it returns the model that is cast in it."""
    builder = script.owners.get(id(call))
    if builder is None or "." in model:
        return []
    returns = [n.value for n in script.walk_below(builder) if isinstance(n, ast.Return) and n.value is not None]
    parts = [value.elts if isinstance(value, ast.Tuple) else [value] for value in returns]
    places = {
        i
        for listed in parts
        for i, p in enumerate(listed)
        if call in walk_chain(p) or model and get_root_name(p) == model
    }
    stores = [(t, v) for n in script.nodes if isinstance(n, ast.Assign) for t, v in pair_assignments(n)]
    found: list[tuple[str, ast.AST]] = []
    for target, value in stores if places else ():
        calls = [
            c for c in walk_chain(value) if isinstance(c, ast.Call) and last_name(dotted_name(c.func)) == builder.name
        ]
        takers = target.elts if isinstance(target, ast.Tuple) else [target]
        found += [(dotted_name(t), call) for call in calls for i, t in enumerate(takers) if i in places]
    return found


def add_wrappers(script: Script, known: list[tuple[str, ast.AST]]) -> list[tuple[str, ast.AST]]:
    """Return `sharded` for `sharded = FSDP(model)` holds the same weights."""
    for name, values in script.assigned.items():
        for value in values:
            wraps = isinstance(value, ast.Call) and WRAPPER.search(dotted_name(value.func))
            inner = {dotted_name(value.args[0])} if wraps and isinstance(value, ast.Call) and value.args else set()
            inner |= {dotted_name(value).rpartition(".")[0]}  # `unet = pipe.unet`
            inner |= {dotted_name(v) for v in list_held_models(script, value)}
            if any(own in inner - {""} and script.share_scope(value, where) for own, where in known):
                known.append((name, value))
    return known


def list_held_models(script: Script, value: ast.expr) -> list[ast.expr]:
    """Return what a module of this file is made from, `Step(student=net)`, where nothing is frozen."""
    module = script.class_by_name.get(dotted_name(value.func)) if isinstance(value, ast.Call) else None
    trains = module is not None and "forward" in script.list_methods(module) and not is_trained_in_part(script, set())
    return [*value.args, *(k.value for k in value.keywords)] if trains and isinstance(value, ast.Call) else []


def get_root_name(value: ast.expr) -> str:
    """Return `net` for `net.cuda().train()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return dotted_name(value)


def is_only_for_evaluation(script: Script, call: ast.Call) -> bool:
    """Return whether the cast is under `if args.eval:` or similar."""
    tests = [n.test for n in script.nodes if isinstance(n, ast.If) and any(call is c for c in script.calls_below(n))]
    return any(word in ast.unparse(test).lower() for test in tests for word in EVALUATION_WORDS)


def walk_chain(value: ast.expr) -> Iterator[ast.expr]:
    """Return a call, what it is called on, and so on: `Net().half().cuda()`."""
    node: ast.expr = value
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else ast.Constant(value=None)


def get_cast_dtype(node: ast.Call, script: Script) -> str:
    """Return the dtype that `.half()`, `.float()` or `.to(torch.float16)` gives, or nothing."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    simple = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
    if node.func.attr in simple and not node.args:
        return simple[node.func.attr]
    if node.func.attr in ("to", "type"):
        target = [*node.args, *([value] if (value := keyword(node, "dtype")) is not None else [])]
        return next(filter(None, (read_format(argument, script) for argument in target)), "")
    return ""
