"""The order in which a training loop does things: every call of a function, with its surroundings, callees inlined.

A `Trace` is one straight line through a function. Both branches of an `if` follow each other; each event records its
conditions, so that events in opposite branches are never a sequence. Methods of the same class and its bases,
of objects whose class is in the same module, and functions of the module are walked in place of their calls, with
parameters (and `self`) renamed to what was passed: that is the data flow through methods. Loops are walked once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from halfstep_check.lint.regions import Region, is_no_grad, read_region
from halfstep_check.lint.script import (
    Function,
    Script,
    dotted_name,
    is_constant,
    last_name,
    list_methods,
    list_passed_tests,
    normalise_window_test,
)

MAX_EVENTS = 5_000
"""More calls than any real function has; what follows is not looked at, so that time stays bounded."""
MAX_INLINED = 5
"""Calls inside calls: enough for fit() -> train() -> epoch() -> step() -> amp.backward()."""

Condition = tuple[str, bool]
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One call, or one assignment, with everything that decides when and how it happens."""

    node: ast.Call | ast.Assign | ast.AugAssign
    index: int
    name: str
    """Full dotted name of what is called; empty for assignments."""
    receiver: str = ""
    """What the method is called on, with parameters renamed to the caller's arguments."""
    method: str = ""
    called: str = ""
    """What is called, with parameters renamed to the caller's arguments: `model` for `net(x)` in a helper."""
    arguments: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()
    """Names an assigned value is made from."""
    scaled_by: str = ""
    """The scaler whose `scale()` produced what `backward()` is called on."""
    conditions: frozenset[Condition] = frozenset()
    loops: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    grad_off: bool = False
    function: str = ""
    guards: tuple[ast.If, ...] = ()
    """The `if` statements around it, outermost first."""
    optimizer: str = ""
    """`optimizer` of `optimizer.step()` and of `scaler.step(optimizer)`."""
    site: ast.AST | None = None
    """The call in the function the trace starts from that led here; the node itself if it is in that function."""

    @property
    def region(self) -> Region | None:
        return self.regions[-1] if self.regions else None

    def excludes(self, other: Event) -> bool:
        """Return whether the two are in opposite branches."""
        # One test with both answers is enough: the two can then never run in the same iteration.
        return any((text, not holds) in other.conditions for text, holds in self.conditions)

    def implied_by(self, other: Event) -> bool:
        """Return whether this happens whenever `other` does, accumulation windows aside."""
        # A test with a modulo is a window: it decides when a step is due, not which branch runs.
        return all("%" in text or (text, holds) in other.conditions for text, holds in self.conditions)


@dataclass(kw_only=True)
class Scope:
    """Where the walk is: names of the function, and what encloses the statement."""

    function: str
    class_node: ast.ClassDef | None
    renamed: dict[str, str] = field(default_factory=dict)
    local: frozenset[str] = frozenset()
    conditions: frozenset[Condition] = frozenset()
    loops: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    grad_off: bool = False
    guards: tuple[ast.If, ...] = ()
    depth: int = 0
    site: ast.Call | None = None

    def derive(self, **changes: object) -> Scope:
        return Scope(**{**self.__dict__, **changes})


@dataclass(frozen=True, kw_only=True, slots=True)
class Callee:
    """What a call runs: the function, the class that `self` is of, and the names that it sees besides its own."""

    function: Function
    class_node: ast.ClassDef | None = None
    inherits: dict[str, str] = field(default_factory=dict)


class Trace:
    """All events of one function in order."""

    def __init__(
        self,
        script: Script,
        root: Function | ast.Module,
        class_node: ast.ClassDef | None = None,
        *,
        trainers: frozenset[int] = frozenset(),
    ) -> None:
        self.script = script
        self.root = root
        self.trainers = trainers
        self.events: list[Event] = []
        self.scaled: dict[str, str] = {}
        self.windows: set[str] = set()
        self.fatal: set[str] = set()
        self.inlined: set[int] = set()
        self.active: list[ast.AST] = []
        self.root_name = root.name if isinstance(root, Function) else "<module>"
        scope = Scope(function=self.root_name, class_node=class_node)
        self.walk_function(root, scope)

    def calls(self, *methods: str) -> Iterator[Event]:
        return (event for event in self.events if event.method in methods)

    def walk_function(self, function: Function | ast.Module, scope: Scope) -> None:
        self.active.append(function)
        if isinstance(function, Function):
            for decorator in function.decorator_list:
                scope = self.open_context(decorator, scope)
        self.walk_block(function.body, scope)
        self.active.pop()

    def walk_block(self, body: list[ast.stmt], scope: Scope) -> None:
        for statement in body:
            if len(self.events) > MAX_EVENTS:
                return
            self.walk_statement(statement, scope)
            # After `if bad: continue` everything that follows in the block runs where `bad` is false.
            for test, holds in list_passed_tests(statement):
                scope = scope.derive(conditions=scope.conditions | self.read_conditions(test, holds, scope))

    def walk_statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self.walk_expression(node.test, scope)
            guarded = scope.derive(guards=(*scope.guards, node))
            for body, holds in ((node.body, True), (node.orelse, False)):
                known = self.read_conditions(node.test, holds, scope)
                self.walk_block(body, guarded.derive(conditions=scope.conditions | known))
            # A path that raises ends the run: rules about forgotten calls need not consider it.
            if node.body and isinstance(node.body[-1], ast.Raise):
                self.fatal |= {
                    text for holds in (True, False) for text, _ in self.read_conditions(node.test, holds, scope)
                }
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self.walk_expression(node.test if isinstance(node, ast.While) else node.iter, scope)
            # `for optimizer in optimizers:` is one step of all of them, no iteration of training.
            over = dotted_name(node.target) if isinstance(node, ast.For) else ""
            steps = bool(over) and self.script.is_optimizer(over)
            # Loops are compared by identity: two events share an iteration if they have the same loops.
            self.walk_block(node.body, scope if steps else scope.derive(loops=(*scope.loops, id(node))))
            self.walk_block(node.orelse, scope)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.walk_expression(item.context_expr, scope)
                scope = self.open_context(item.context_expr, scope)
            self.walk_block(node.body, scope)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.walk_block(node.body, scope)
            for handler in node.handlers:
                failed = (f"except at line {handler.lineno}", True)
                self.walk_block(handler.body, scope.derive(conditions=scope.conditions | {failed}))
            self.walk_block([*node.orelse, *node.finalbody], scope)
        elif isinstance(node, ast.Match):
            self.walk_match(node, scope)
        # `x: Tensor = f()` is walked as the plain assignment it is.
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            plain = ast.Assign(targets=[node.target], value=node.value)
            self.walk_statement(ast.copy_location(plain, node), scope)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            self.walk_expression(node.value, scope)
            self.walk_assignment(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.walk_expression(child, scope)

    def walk_match(self, node: ast.Match, scope: Scope) -> None:
        """Every case excludes the others."""
        subject = ast.unparse(node.subject)
        names = [f"{subject} is case {number}" for number in range(len(node.cases))]
        for case, own in zip(node.cases, names, strict=True):
            known = {(name, name == own) for name in names}
            self.walk_block(case.body, scope.derive(conditions=scope.conditions | known))

    def open_context(self, context: ast.expr, scope: Scope) -> Scope:
        region = read_region(context, self.script)
        if region is not None:
            return scope.derive(regions=(*scope.regions, region))
        return scope.derive(grad_off=True) if is_no_grad(context, self.script) else scope

    def read_conditions(self, test: ast.expr, holds: bool, scope: Scope) -> frozenset[Condition]:
        """Return what is known where `test` holds (or not): negations and `is None` are brought to one form."""
        if is_constant(test, True) and holds:
            return frozenset()
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.read_conditions(test.operand, not holds, scope)
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and is_constant(test.comparators[0], None):
            is_not = isinstance(test.ops[0], ast.IsNot | ast.NotEq)
            return self.read_conditions(test.left, holds if is_not else not holds, scope)
        if (due := normalise_window_test(test)) is not None:
            return self.read_conditions(due, not holds, scope)
        known = {(self.get_key_text(test, scope), holds)}
        # `a and b` that holds tells that a and b hold; `a or b` that fails tells that both fail.
        splits = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or)
        if splits and isinstance(test, ast.BoolOp):
            for part in test.values:
                known |= self.read_conditions(part, holds, scope)
        # A modulo in a condition is how scripts write accumulation windows.
        self.windows |= {text for text, _ in known if "%" in text}
        return frozenset(known)

    def get_key_text(self, node: ast.expr, scope: Scope) -> str:
        """Return the text of an expression, its parameters renamed; `do_step` for a modulo keeps the modulo."""
        if isinstance(node, ast.Name):
            values = self.script.list_values(node.id)
            if len(values) == 1 and any(
                isinstance(i, ast.BinOp) and isinstance(i.op, ast.Mod) for i in self.script.walk_below(values[0])
            ):
                return ast.unparse(values[0])
        asked = self.script.find_function(last_name(dotted_name(node.func if isinstance(node, ast.Call) else node)))
        ends = [n.value for n in asked.body if isinstance(n, ast.Return) and n.value] if asked is not None else []
        if len(ends) == 1 and any(isinstance(i, ast.Mod) for i in ast.walk(ends[0])):
            return ast.unparse(ends[0])  # `if self.is_due(step):` asks what it returns
        if isinstance(node, ast.Compare) and id(node) in self.script.restarts:
            # A counter that starts again at N is a window of N, as a modulo is.
            return f"{ast.unparse(node.left)} % {ast.unparse(node.comparators[0])} == 0"
        key = self.get_key(node, scope)
        return key or ast.unparse(node)

    def get_key(self, node: ast.AST | None, scope: Scope) -> str:
        """Return a name for the object an expression denotes, the same in caller and callee; empty for computed
        values."""
        if isinstance(node, ast.Name):
            if node.id in scope.renamed:
                return scope.renamed[node.id]
            # Local names of an inlined function must not collide with the caller's.
            return f"{scope.function}:{node.id}" if scope.depth and node.id in scope.local else node.id
        if isinstance(node, ast.Attribute):
            base = self.get_key(node.value, scope)
            return f"{base}.{node.attr}" if base else ""
        if isinstance(node, ast.Subscript):
            base = self.get_key(node.value, scope)
            return f"{base}[{ast.unparse(node.slice)}]" if base else ""
        return ""

    def walk_expression(self, node: ast.expr, scope: Scope) -> None:
        """Calls inside an expression, innermost first, as Python evaluates them."""
        if isinstance(node, Comprehension):
            self.walk_comprehension(node, scope)
            return
        if isinstance(node, ast.IfExp):  # `loss.backward() if scaler is None else scaler.scale(loss).backward()`
            self.walk_expression(node.test, scope)
            for arm, holds in ((node.body, True), (node.orelse, False)):
                known = self.read_conditions(node.test, holds, scope)
                self.walk_expression(arm, scope.derive(conditions=scope.conditions | known))
            return
        # Arguments are evaluated before the call itself.
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.walk_expression(child, scope)
            elif isinstance(child, ast.keyword):
                self.walk_expression(child.value, scope)
        if isinstance(node, ast.Call):
            self.walk_call(node, scope)

    def walk_comprehension(self, node: Comprehension, scope: Scope) -> None:
        """`[self.step(b) for b in loader]` is a loop like any other."""
        self.walk_expression(node.generators[0].iter, scope)
        inner = scope.derive(loops=(*scope.loops, id(node)))
        for number, generator in enumerate(node.generators):
            for part in (*((generator.iter,) if number else ()), *generator.ifs):
                self.walk_expression(part, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.walk_expression(part, inner)

    def walk_call(self, node: ast.Call, scope: Scope) -> None:
        callee = self.find_callee(node, scope)
        if (
            callee is not None
            and id(callee.function) in self.trainers
            and scope.depth < MAX_INLINED
            and callee.function not in self.active
        ):
            # The callee's events take the place of the call, under the caller's conditions, loops and regions.
            self.inlined.add(id(callee.function))
            self.walk_function(callee.function, self.make_callee_scope(callee, node, scope))
            return
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        receiver = self.get_key(owner, scope)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = tuple(self.get_key(argument, scope) for argument in node.args)
        # `scaler.step(optimizer)` steps its argument, `optimizer.step()` its receiver.
        stepped = (arguments[0] if arguments else receiver) if method == "step" else ""
        self.events.append(
            self.make_event(
                node,
                scope,
                name=self.script.resolve_name(node.func),
                receiver=receiver,
                method=method,
                called=self.get_key(node.func, scope),
                arguments=arguments,
                optimizer=stepped if self.script.is_optimizer(stepped) else "",
                scaled_by=self.find_scaler(owner, scope),
            )
        )

    def make_event(self, node: ast.Call | ast.Assign | ast.AugAssign, scope: Scope, **known: object) -> Event:
        return Event(
            node=node,
            index=len(self.events),
            conditions=scope.conditions,
            loops=scope.loops,
            regions=scope.regions,
            grad_off=scope.grad_off,
            guards=scope.guards,
            function=scope.function,
            site=scope.site or node,
            **{"name": "", **known},  # type: ignore[arg-type]
        )

    def find_callee(self, node: ast.Call, scope: Scope) -> Callee | None:
        """Return the function of this module, or the method of a class of it, that a call runs, when that is
        certain."""
        func = node.func
        if isinstance(func, ast.Name) and func.id not in scope.local:
            for function in reversed(self.active):
                if (nested := self.script.list_nested(function).get(func.id)) is not None:
                    return Callee(function=nested, class_node=scope.class_node, inherits=scope.renamed)
            if (plain := self.script.functions.get(func.id)) is not None:
                return Callee(function=plain)
        if isinstance(func, ast.Attribute):
            found = self.find_method(func, scope)
            if found is not None:
                return found
        held = self.get_key(func, scope)
        owner = self.script.find_class(held) if held else None
        return self.bind_method("__call__", owner, held) if owner is not None else None

    def find_method(self, func: ast.Attribute, scope: Scope) -> Callee | None:
        """Return `self.step`, `super().step` and `self.amp.step`, where the class is in this module."""
        own = scope.class_node
        if isinstance(func.value, ast.Name) and func.value.id == "self":
            return self.bind_method(func.attr, own, scope.renamed.get("self", "self")) if own is not None else None
        if isinstance(func.value, ast.Call) and getattr(func.value.func, "id", "") == "super" and own is not None:
            above = next((c for c in self.script.list_parents(own) if func.attr in list_methods(c)), None)
            found = self.bind_method(func.attr, above, scope.renamed.get("self", "self")) if above is not None else None
            return replace(found, class_node=own) if found is not None else None
        key = self.get_key(func.value, scope)
        owner = self.script.find_class(key) if key else None
        return self.bind_method(func.attr, owner, key) if owner is not None else None

    def bind_method(self, name: str, owner: ast.ClassDef, key: str) -> Callee | None:
        function = self.script.list_methods(owner).get(name)
        return Callee(function=function, class_node=owner, inherits={"self": key}) if function is not None else None

    def make_callee_scope(self, callee: Callee, call: ast.Call, scope: Scope) -> Scope:
        function = callee.function
        parameters = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
        if parameters[:1] == ["self"]:
            parameters = parameters[1:]
        passed = dict(zip(parameters, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        renamed = {name: self.get_key(value, scope) or f"{function.name}:{name}" for name, value in passed.items()}
        stored = self.script.list_stored_names(function)
        every = {p.arg for p in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)} - {"self"}
        # A parameter that the function assigns anew no longer denotes the caller's object.
        kept = {name: text for name, text in renamed.items() if name not in stored or name == text}
        # A closure sees the names of the function around it, unless it has its own.
        outer = {name: text for name, text in callee.inherits.items() if name not in stored | every}
        return scope.derive(
            function=function.name,
            class_node=callee.class_node,
            renamed={**outer, **kept},
            local=frozenset(stored | every),
            depth=scope.depth + 1,
            site=scope.site or call,
        )

    def find_scaler(self, owner: ast.expr | None, scope: Scope) -> str:
        """Return the scaler behind `scaler.scale(loss)`, a helper that returns it, or a name that holds its result."""
        if isinstance(owner, ast.IfExp):
            return self.find_scaler(owner.body, scope) or self.find_scaler(owner.orelse, scope)
        if isinstance(owner, ast.Call):
            callee = self.find_callee(owner, scope) if scope.depth < MAX_INLINED else None
            if callee is not None and callee.function not in self.active:
                inner = self.make_callee_scope(callee, owner, scope)
                ends = (n.value for n in self.script.walk_below(callee.function) if isinstance(n, ast.Return))
                return next(filter(None, (self.find_scaler(end, inner) for end in ends)), "")
            if isinstance(owner.func, ast.Attribute) and owner.func.attr == "scale" and len(owner.args) == 1:
                return self.get_key(owner.func.value, scope)
            return ""
        return self.scaled.get(self.get_key(owner, scope), "") if owner is not None else ""

    def walk_assignment(self, node: ast.Assign | ast.AugAssign, scope: Scope) -> None:
        raw = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [e for t in raw for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
        targets = tuple(key for target in flat if (key := self.get_key(target, scope)))
        for target in targets:
            self.scaled.pop(target, None)
            if scaler := self.find_scaler(node.value, scope):
                self.scaled[target] = scaler
        uses = frozenset(
            self.get_key(n, scope)
            for n in self.script.walk_below(node.value)
            if isinstance(n, ast.Name | ast.Attribute)
        )
        self.events.append(self.make_event(node, scope, targets=targets, uses=uses))
