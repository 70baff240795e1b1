"""Syntax-tree helpers, and a parsed training script: its names, functions, classes and constant values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from halfstep_check.findings import Edit, Finding, Place, split_lines

Function = ast.FunctionDef | ast.AsyncFunctionDef


def last_name(key: str) -> str:
    """Return `scaler` for `self.scaler` and of `train:scaler`."""
    return key.rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def dotted_name(node: ast.AST | None) -> str:
    """Return `a.b.c` of a chain of attributes, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def pair_assignments(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with their values; `a, b = f(), g()` is two assignments."""
    for target in node.targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return an argument by position or by name."""
    return call.args[position] if len(call.args) > position else keyword(call, name)


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def read_number(node: ast.expr | None) -> float | None:
    """Return the value of a literal number, also of `1 - 1e-6` and `2.0**14`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = read_number(node.operand)
        return -operand if operand is not None else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Pow):
        left, right = read_number(node.left), read_number(node.right)
        if left is None or right is None:
            return None
        # Bounded, so that no power of a strange script overflows or becomes complex.
        is_small_power = left > 0 and abs(right) <= 100 and left < 1000
        return left - right if isinstance(node.op, ast.Sub) else left**right if is_small_power else None
    return None


def list_names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def list_methods(class_node: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in class_node.body if isinstance(node, Function)}


def list_parameters(root: ast.AST) -> set[str]:
    return {a.arg for a in ast.walk(root.args) if isinstance(a, ast.arg)} if isinstance(root, Function) else set()


def list_passed_tests(statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """Return tests whose answer is known after a statement, because the other one leaves; those inside its blocks
    too."""
    if isinstance(statement, ast.If):
        if leaves(statement.body):
            yield statement.test, False
        elif leaves(statement.orelse):
            yield statement.test, True
    if isinstance(statement, ast.If | ast.With | ast.Try):
        handlers = getattr(statement, "handlers", [])
        parts = [statement.body, getattr(statement, "orelse", []), *(handler.body for handler in handlers)]
        for inner in (inner for part in parts if not leaves(part) for inner in part):
            yield from list_passed_tests(inner)


def normalise_window_test(test: ast.expr) -> ast.expr | None:
    """Return `i % n == 0` for `i % n != 0` and for `i % n` alone, which hold where it does not."""
    unequal = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq) and len(test.ops) == 1
    left = test.left if unequal and isinstance(test, ast.Compare) else test
    zero = test.comparators[0] if unequal and isinstance(test, ast.Compare) else ast.Constant(value=0)
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod) or getattr(zero, "value", None) != 0:
        return None
    return ast.copy_location(ast.Compare(left=left, ops=[ast.Eq()], comparators=[zero]), test)


def leaves(body: list[ast.stmt]) -> bool:
    """Return whether a block never falls through to what follows it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)


MARKS = ast.expr_context | ast.operator | ast.unaryop | ast.cmpop | ast.boolop
"""Nodes for single tokens, without code of their own; `ast` uses one object for all of a kind."""

AUTOCASTS = {
    *("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast", "autocast"),
    *("torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast", "torch.cpu.amp.autocast"),
}
SCALERS = {
    *("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "GradScaler"),
    *("torch.cuda.amp.grad_scaler.GradScaler", "torch.amp.grad_scaler.GradScaler", "torch.GradScaler"),
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
}

WRAPPER = re.compile(r"(FSDP|FullyShardedDataParallel|DDP|DistributedDataParallel|DataParallel|torch\.compile)$")
"""What holds a model and calls it."""


@dataclass(kw_only=True)
class Script:
    """One module of source code, with the look-ups every rule needs."""

    tree: ast.Module
    text: str
    path: str
    imports: dict[str, str] = field(default_factory=dict)
    stored: dict[int, frozenset[str]] = field(default_factory=dict)
    nested: dict[int, dict[str, Function]] = field(default_factory=dict)
    held: dict[str, ast.ClassDef | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.imports |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    # Of two sources, `try: … except ImportError:`, the first is the one that is meant to be there.
                    self.imports.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")

    @cached_property
    def layout(self) -> tuple[list[ast.AST], dict[int, tuple[int, int]]]:
        """All nodes, each before those below it, and their spans by identity: a subtree is then a slice."""
        # Rules ask for subtrees thousands of times; slices of one pre-order list replace repeated walks.
        spans: dict[int, tuple[int, int]] = {}
        order: list[ast.AST] = []

        def visit(node: ast.AST) -> None:
            first = len(order)
            order.append(node)
            for value in node.__dict__.values():
                for item in value if type(value) is list else (value,):
                    if isinstance(item, ast.AST) and not isinstance(item, MARKS):
                        visit(item)
            spans[id(node)] = first, len(order)

        visit(self.tree)
        return order, spans

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return self.layout[0]

    def walk_below(self, node: ast.AST) -> list[ast.AST]:
        """Return a node of this script and all below it, outer ones first; nodes made elsewhere are walked."""
        span = self.layout[1].get(id(node))
        return self.nodes[span[0] : span[1]] if span is not None else list(ast.walk(node))

    def calls_below(self, node: ast.AST) -> Iterator[ast.Call]:
        return (inner for inner in self.walk_below(node) if isinstance(inner, ast.Call))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions of the module level by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, Function)}

    def list_nested(self, function: ast.AST) -> dict[str, Function]:
        """Return functions defined directly inside another one's body, by name."""
        if id(function) not in self.nested:
            inner = self.walk_below(function)[1:] if isinstance(function, Function) else []
            self.nested[id(function)] = {node.name: node for node in inner if isinstance(node, Function)}
        return self.nested[id(function)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def class_by_name(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.classes}

    def list_parents(self, class_node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the bases that this module defines, nearest first."""
        found: list[ast.ClassDef] = []
        # Breadth first, so that nearer bases override farther ones.
        waiting = [class_node]
        while waiting:
            bases = (self.class_by_name.get(dotted_name(base)) for base in waiting.pop(0).bases)
            new = [base for base in bases if base is not None and base is not class_node and base not in found]
            found, waiting = [*found, *new], [*waiting, *new]
        return found

    def list_methods(self, class_node: ast.ClassDef) -> dict[str, Function]:
        """Return methods of a class, those of its bases in this module included."""
        found: dict[str, Function] = {}
        for node in reversed([class_node, *self.list_parents(class_node)]):
            found |= list_methods(node)
        return found

    def find_class(self, key: str) -> ast.ClassDef | None:
        """Return the class of this module whose instance a name holds, where it holds nothing else (None aside)."""
        if key not in self.held:
            # Guards against cycles before the values are followed.
            self.held[key] = None  # a name that is made from itself
            arms = [
                arm for v in self.list_values(key) for arm in ([v.body, v.orelse] if isinstance(v, ast.IfExp) else [v])
            ]
            made = {self.find_made_class(arm) for arm in arms if not is_constant(arm, None)}
            made = made or {self.annotated.get(key.rsplit(":", 1)[-1])}
            self.held[key] = made.pop() if len(made) == 1 else None
        return self.held[key]

    def find_made_class(self, value: ast.expr) -> ast.ClassDef | None:
        while isinstance(value, ast.Call):
            if (found := self.class_by_name.get(dotted_name(value.func))) is not None:
                return found
            wraps = WRAPPER.search(dotted_name(value.func)) and value.args
            chained = isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
            # `Net().cuda()` and `DDP(net)` hold a Net.
            value = value.args[0] if wraps else value.func.value if chained else ast.Constant(value=None)  # type: ignore[attr-defined]
        name = dotted_name(value)
        return self.find_class(name) if name else None

    def trace_origins(self, key: str, seen: frozenset[str] = frozenset()) -> list[ast.expr]:
        """Return what the values of a name come from, `FSDP(net)` for `model = sharded.to(device)`; names followed."""
        found: list[ast.expr] = []
        seen |= {key}
        for value in self.list_values(key):
            # These return the object itself.
            while isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("to", "cuda", "train", "eval"):
                value = value.func.value  # type: ignore[attr-defined]
            for end in self.list_returns(value) or [value]:
                name = dotted_name(end)
                if name not in seen:  # `loss = loss.to(device)` is made from itself
                    found += (self.trace_origins(name, seen) if name else []) or [end]
        return found

    @cached_property
    def annotated(self) -> dict[str, ast.ClassDef | None]:
        """Parameters that are said to be an instance of a class of this module, by name."""
        named = [(node.arg, dotted_name(node.annotation)) for node in self.nodes if isinstance(node, ast.arg)]
        return {name: self.class_by_name[kind] for name, kind in named if kind in self.class_by_name}

    @cached_property
    def named_functions(self) -> dict[str, list[Function]]:
        """All functions and methods by name."""
        found: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def local_names(self) -> set[str]:
        """Names of this module's functions, also with an object of this module before them: `amp.context`."""
        dotted = {dotted_name(call.func) for call in self.calls}
        # Methods of objects whose class is in this file, so that `amp.context()` is followed into it.
        held = {n for n in dotted if "." in n and self.find_class(n.rpartition(".")[0]) is not None}
        return held | {node.name for node in self.nodes if isinstance(node, Function)}

    def find_function(self, name: str) -> Function | None:
        """Return the function or method of this name, when there is one alone."""
        found = self.named_functions.get(name, [])
        return found[0] if len(found) == 1 else None

    def find_property(self, node: ast.AST | None) -> Function | None:
        """Return `def dtype(self)` under @property, for `cfg.dtype`."""
        found = self.find_function(node.attr) if isinstance(node, ast.Attribute) else None
        return found if found is not None and "property" in map(dotted_name, found.decorator_list) else None

    def resolve_name(self, node: ast.AST) -> str:
        """Return the full dotted name an expression means after imports, or an empty string."""
        dotted = dotted_name(node)
        head, _, rest = dotted.partition(".")
        full = self.imports.get(head, head)
        return f"{full}.{rest}" if rest else full

    def get_place(self, node: ast.AST) -> Place:
        return Place(path=self.path, line=getattr(node, "lineno", 1), column=getattr(node, "col_offset", 0))

    @cached_property
    def lines(self) -> list[str]:
        return split_lines(self.text)

    @cached_property
    def code(self) -> str:
        """The text without its comments."""
        return re.sub(r"(^|\s)#.*", "", self.text)

    def find_position(self, line: int, byte_column: int) -> tuple[int, int]:
        """Convert a position of `ast`, which counts UTF-8 bytes, to characters."""
        return line, len(self.lines[line - 1].encode()[:byte_column].decode(errors="ignore"))

    def report(
        self,
        rule: str,
        node: ast.AST,
        message: str,
        *,
        fix: str = "",
        related: ast.AST | None = None,
        edits: tuple[Edit, ...] = (),
    ) -> Finding:
        others = (self.get_place(related),) if related is not None else ()
        return Finding(rule=rule, message=message, place=self.get_place(node), fix=fix, related=others, edits=edits)

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """Every plain name or attribute (`x`, `self.x`) and the values it is ever given."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target, value in pair_assignments(node):
                    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                    given = self.list_returned_tuples(value, len(parts)) if len(parts) > 1 else []
                    for number, part in enumerate(parts):
                        if name := dotted_name(part):
                            # `a, b = f()`: what a function of this file returns there, or something that f gave.
                            found.setdefault(name, []).extend([end[number] for end in given] or [value])
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                found.setdefault(dotted_name(node.target), []).append(node.value)
        return found

    def list_returns(self, value: ast.expr) -> list[ast.expr]:
        """Return what a function of this file may return to a call."""
        own = self.find_function(last_name(dotted_name(value.func))) if isinstance(value, ast.Call) else None
        inside = self.walk_below(own) if own is not None else []
        return [n.value for n in inside if isinstance(n, ast.Return) and n.value is not None]

    def list_returned_tuples(self, value: ast.expr, length: int) -> list[list[ast.expr]]:
        """Return the tuples of this length that a function of this file may return to a call."""
        ends = self.list_returns(value)
        tuples = [end.elts for end in ends if isinstance(end, ast.Tuple) and len(end.elts) == length]
        return tuples if len(tuples) == len(ends) else []

    def list_values(self, key: str) -> list[ast.expr]:
        """Return what a name is ever given; a walk into a function writes its local names as `function:name`."""
        return self.assigned.get(self.canonicalise(key), [])

    def canonicalise(self, key: str) -> str:
        """Return a name as the code that gives it a value writes it: `self.scaler` for `trainer.scaler`."""
        name = key.rsplit(":", 1)[-1]
        owner, _, attribute = name.rpartition(".")
        if name in self.assigned or owner in ("", "self"):
            return name
        return f"self.{attribute}" if attribute in self.list_attributes(self.find_class(owner)) else name

    def list_attributes(self, class_node: ast.ClassDef | None) -> frozenset[str]:
        """Return what the methods of a class, and of its bases here, set on `self`; `config.device` is not the
        trainer's."""
        if class_node is None:
            return frozenset()
        if id(class_node) not in self.stored:
            inside = (n for c in (class_node, *self.list_parents(class_node)) for n in self.walk_below(c))
            stores = (n for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            self.stored[id(class_node)] = frozenset(n.attr for n in stores if dotted_name(n.value) == "self")
        return self.stored[id(class_node)]

    @cached_property
    def owners(self) -> dict[int, Function]:
        """The innermost function around every node, by the node's identity; module level is not listed."""
        found: dict[int, Function] = {}
        for function in (node for node in self.nodes if isinstance(node, Function)):
            # Outer functions come first in `nodes`, so inner ones win.
            found |= {id(inner): function for statement in function.body for inner in self.walk_below(statement)}
        return found

    def share_scope(self, one: ast.AST, other: ast.AST) -> bool:
        """Return whether two nodes can share local names: one function, or module level for either."""
        first, second = self.owners.get(id(one)), self.owners.get(id(other))
        return first is second or first is None or second is None

    @cached_property
    def model_names(self) -> set[str]:
        """Last names of what has parameters, or is set to train or eval: models, whatever they are called."""
        owners = [call.func for call in self.calls if isinstance(call.func, ast.Attribute)]
        models = (func.value for func in owners if func.attr in ("parameters", "train", "eval"))
        return {dotted_name(model).rsplit(".", 1)[-1] for model in models} - {""}

    def is_optimizer(self, key: str) -> bool:
        """Match optimizers by name, `optimizer`, `optim_g`, `self.opt`, `optD`, or by what it is made from or handed
        to."""
        name = last_name(key)
        low = name.lower()
        named = "optim" in low or low == "opt" or low.startswith("opt_") or low.endswith("_opt")
        return named or bool(re.match(r"opt[A-Z]", name)) or name in self.optimizer_names

    @cached_property
    def scaler_names(self) -> set[str]:
        """Last names, in lower case, of what is given a GradScaler."""
        made = ((n, v) for n, values in self.assigned.items() for v in values if isinstance(v, ast.Call))
        return {last_name(name).lower() for name, value in made if self.resolve_name(value.func) in SCALERS}

    @cached_property
    def optimizer_names(self) -> set[str]:
        """Last names of what torch.optim makes here, and of what unscale_() is called with."""
        made = {n for n, values in self.assigned.items() if any(map(self.makes_optimizer, values))}
        unscaled = {dotted_name(c.args[0]) for c in self.calls if getattr(c.func, "attr", "") == "unscale_" and c.args}
        return {last_name(name) for name in made | unscaled} - {""}

    def makes_optimizer(self, value: ast.expr) -> bool:
        name = self.resolve_name(value.func) if isinstance(value, ast.Call) else ""
        return name.startswith("torch.optim.") and not name.startswith(("torch.optim.lr_scheduler", "torch.optim.swa"))

    @cached_property
    def restarts(self) -> set[int]:
        """Tests `count == n` of a counter that its own `if` sets to zero, by identity: windows of n."""
        ups = {dotted_name(n.target) for n in self.nodes if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)}
        found: set[int] = set()
        for node in (n for n in self.nodes if isinstance(n, ast.If)):
            stores = [s for inner in node.body for s in self.walk_below(inner) if isinstance(s, ast.Assign)]
            zeroed = {dotted_name(t) for s in stores if getattr(s.value, "value", 1) == 0 for t in s.targets}
            tests = [n for n in self.walk_below(node.test) if isinstance(n, ast.Compare) and len(n.ops) == 1]
            grows = (n for n in tests if isinstance(n.ops[0], ast.Eq | ast.GtE))
            found |= {id(n) for n in grows if dotted_name(n.left) in ups & zeroed}
        return found

    @cached_property
    def parameters(self) -> set[str]:
        """Names of any function's parameters: the caller decides their value."""
        return {node.arg for node in self.nodes if isinstance(node, ast.arg)}

    def is_taken(self, node: ast.AST | None) -> bool:
        """Return whether a name is a parameter of a function around it: the caller decides its value."""
        name, around = dotted_name(node), self.owners.get(id(node))
        while name and around is not None:
            if name in list_parameters(around):
                return True
            around = self.owners.get(id(around))
        return False

    def list_passed_values(self, name: str) -> list[ast.expr]:
        """Return what calls of this file give to the parameter of this name, a class's `__init__()` included."""
        found: list[ast.expr] = []
        for function in (n for n in self.nodes if isinstance(n, Function) and name in list_parameters(n)):
            owner = next((c.name for c in self.classes if function in c.body), "")
            taken = [a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg != "self"]
            called = owner if function.name == "__init__" else function.name
            place = taken.index(name) if name in taken else len(taken)
            found += [
                v for c in self.calls if last_name(dotted_name(c.func)) == called and (v := argument(c, place, name))
            ]
        return found

    @cached_property
    def autocast_names(self) -> set[str]:
        """Plain names that are given an autocast context, or a function that makes one."""
        makers = {name for name, values in self.assigned.items() if any(self.mentions_autocast(v) for v in values)}
        return {name.rsplit(".", 1)[-1] for name in makers}

    def mentions_autocast(self, value: ast.expr) -> bool:
        names = (node for node in self.walk_below(value) if isinstance(node, ast.Name | ast.Attribute))
        return any(self.resolve_name(node) in AUTOCASTS for node in names)

    def list_stored_names(self, function: Function) -> frozenset[str]:
        """Return names a function assigns."""
        if id(function) not in self.stored:
            stores = (n for n in self.walk_below(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            self.stored[id(function)] = frozenset(node.id for node in stores)
        return self.stored[id(function)]

    @cached_property
    def defaults(self) -> dict[str, list[ast.expr]]:
        """Defaults of settings: `add_argument("--dtype", default=…)`, a class's fields."""
        found: dict[str, list[ast.expr]] = {}
        for call in self.calls:
            flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            value = keyword(call, "default")
            if getattr(call.func, "attr", "") == "add_argument" and flags and value is not None:
                found.setdefault(flags[-1].lstrip("-").replace("-", "_"), []).append(value)
        for node in (n for c in self.classes for n in c.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found.setdefault(dotted_name(target), []).append(node.value)  # type: ignore[arg-type]
        return found

    def read_default(self, node: ast.expr | None) -> ast.expr | None:
        """Return the default of `args.dtype`, where the file has one alone; anything else stays as it is."""
        fixed = self.read_constant(node)
        values = self.defaults.get(fixed.attr, []) if isinstance(fixed, ast.Attribute) else []
        return values[0] if len(values) == 1 else fixed

    def read_constant(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression a name has when it is assigned exactly once; anything else is returned unchanged."""
        for _ in range(4):
            name = dotted_name(node)
            values = self.assigned.get(name, [])
            if len(values) != 1 or self.is_taken(node):
                return node
            node = values[0]
        return node
