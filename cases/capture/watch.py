"""Where a model's calls of attention pass by: torch's function, Hugging Face's functions, modules that are named."""

import fnmatch
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from tiebreak.cases.capture.calls import AttentionCall, Masks, hugging_face_call, plain_call, sdpa_call
from tiebreak.cases.capture.folder import CaptureError

_EAGER = "eager_attention_forward"  # what Hugging Face's models call their own attention, each in its module
_NAMES = tuple(
    (letter, word, f"{word}_states", f"{word}_layer")
    for letter, word in zip("qkv", ("query", "key", "value"), strict=True)
)


@dataclass(frozen=True)
class AttentionModule:
    """What can't be seen of a module that computes attention: its forward takes q, k and v and returns O."""

    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float | None = None  # None: 1/sqrt(d)
    heads_first: bool = True  # tensors are (batch, heads, tokens, d); False: (batch, tokens, heads, d)


@dataclass(frozen=True)
class Place:
    """Where in a model a call was made, the same in a forward pass and where a checkpoint repeats it."""

    module: str  # the innermost module that was running
    index: int  # of the call among those of one run of it


# (place, a function that makes the call of it, O, O as (batch, heads, queries, d))
OnCall = Callable[[Place, Callable[[], AttentionCall], Tensor, Callable[[Tensor], Tensor]], None]


@dataclass
class _Frame:
    name: str
    calls: int = 0
    named: bool = False  # its call is the module's own: what it calls in turn is part of it


@dataclass
class Watch:
    """Reports every call of attention of a model while it is `looking`; otherwise it only passes calls on."""

    model: nn.Module
    named: Mapping[nn.Module, AttentionModule]
    on_call: OnCall
    masks: Masks = field(default_factory=Masks)
    looking: bool = False
    _local: threading.local = field(default_factory=threading.local)  # a checkpoint's second pass has its own thread
    _hooks: ExitStack = field(default_factory=ExitStack)

    def look(self, looking: bool) -> None:
        """Look at the calls from here on, or stop it."""
        self._hooks.close()
        self._local, self.masks, self.looking = threading.local(), Masks(), looking
        if not looking:
            return
        for name, module in self.model.named_modules():
            before = module.register_forward_pre_hook(partial(self._enter, name))
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this watch into the way of all calls; what was there is put back."""
        with ExitStack() as undo:
            undo.callback(self.look, False)
            original = torch.nn.functional.scaled_dot_product_attention
            watched = self._watched(original, sdpa_call, _as_it_is)
            for module in [torch.nn.functional, *_sources(self.model)]:
                for name, value in list(vars(module).items()):
                    if value is original:  # there, or imported by name before this
                        _replace(undo, module, name, watched)
                if callable(eager := vars(module).get(_EAGER)):
                    ours = self._watched(eager, partial(hugging_face_call, "eager"), _tokens_first)
                    _replace(undo, module, _EAGER, ours)
            self._hugging_face(undo)
            yield

    def _hugging_face(self, undo: ExitStack) -> None:
        """Watch Hugging Face's registered functions, where some library has imported them."""
        functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
        if functions is None:
            return
        for key in list(functions.valid_keys()):
            if key == "sdpa" or "paged" in key:  # the first calls torch's function, the second is for inference
                continue
            original = functions[key]
            register = type(functions).register
            register(key, self._watched(original, partial(hugging_face_call, key), _tokens_first))
            undo.callback(register, key, original)

    def _watched(
        self, original: Callable[..., Any], call: Callable[..., AttentionCall], to_heads: Callable[[Tensor], Tensor]
    ) -> Callable[..., Any]:
        @wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            # What is traced is compiled: it can't be watched.
            if not self.looking or torch.compiler.is_compiling() or getattr(self._local, "inside", False):
                return original(*args, **kwargs)
            self._local.inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._local.inside = False
            out = result[0] if isinstance(result, tuple) else result
            place = self._place()
            if place is not None and isinstance(out, Tensor):
                self.on_call(place, lambda: call(self.masks, *args, **kwargs), out, to_heads)
            return result

        return attention

    @property
    def _frames(self) -> list[_Frame]:
        frames: list[_Frame] = vars(self._local).setdefault("frames", [])
        return frames

    def _place(self) -> Place | None:
        """Where the call that was made just now stands; None where it is a part of another one, or a repetition."""
        frames = self._frames
        if any(frame.named for frame in frames):
            return None
        if not frames:
            # A function of no module: its repetition in the backward pass can't be recognised by its name.
            return None if _in_backward() else Place("", 0)
        frames[-1].calls += 1
        return Place(frames[-1].name, frames[-1].calls - 1)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        del args
        self._frames.append(_Frame(name, named=module in self.named))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._frames:
            return
        frame = self._frames.pop()
        if not frame.named or any(other.named for other in self._frames):
            return
        out = output[0] if isinstance(output, tuple) else output
        if isinstance(out, Tensor):
            how = self.named[module]
            to_heads = _as_it_is if how.heads_first else _tokens_first
            self.on_call(Place(frame.name, 0), lambda: _module_call(module, how, args, kwargs), out, to_heads)


def named_modules(model: nn.Module, patterns: Mapping[str, AttentionModule]) -> dict[nn.Module, AttentionModule]:
    """The modules that names or globs stand for; CaptureError: none, or one whose forward takes no q, k and v."""
    modules: dict[nn.Module, AttentionModule] = {}
    for pattern, how in patterns.items():
        named = dict(model.named_modules())
        fitting = {name: module for name, module in named.items() if name and fnmatch.fnmatchcase(name, pattern)}
        if not fitting:
            reason = "the model has no module of that name; print model.named_modules()"
            raise CaptureError(f"modules={pattern!r}: {reason}")
        for name, module in fitting.items():
            parameters = inspect.signature(module.forward).parameters
            if any(not set(words) & set(parameters) for words in _NAMES):
                names = ", ".join(parameters)
                raise CaptureError(f"modules={pattern!r}: {name}.forward takes {names}, not q, k and v (or query, ...)")
            modules[module] = how
    return modules


def _module_call(module: nn.Module, how: AttentionModule, args: Any, kwargs: Any) -> AttentionCall:
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    q, k, v = (next(arguments[word] for word in words if word in arguments) for words in _NAMES)
    if not how.heads_first:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return plain_call(q, k, v, how.causal, how.scale)


def _replace(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _sources(model: nn.Module) -> list[Any]:
    """The Python modules that a model's classes and their bases come from: FSDP derives a class of its own from one."""
    classes = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    names = dict.fromkeys(cls.__module__ for cls in classes)
    return [sys.modules[name] for name in names if name in sys.modules and sys.modules[name] is not torch.nn.functional]


def _as_it_is(out: Tensor) -> Tensor:
    return out if out.dim() == 4 else out[:, None]


def _tokens_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


def _in_backward() -> bool:
    current = getattr(torch._C, "_current_graph_task_id", None)  # as in torch.utils.checkpoint
    return current is not None and current() != -1
