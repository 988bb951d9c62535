"""Where a model's calls of attention pass by, and what they are in the words of the captured format.

Calls are those of torch's function, of Hugging Face's functions, and of modules that are named.
"""

import fnmatch
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_AS_DEFAULT = 1e-12  # relative: d**-0.5 and 1/sqrt(d) differ in their last bit
# The arguments of Hugging Face's attention functions after q, k, v, mask, dropout, scale and is_causal.
_UNHELD_WORDS = {
    "softcap": "a soft cap",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences",
}
_EAGER = "eager_attention_forward"  # what Hugging Face's models call their own attention, each in its module
_NAMES = tuple(
    (letter, word, f"{word}_states", f"{word}_layer")
    for letter, word in zip("qkv", ("query", "key", "value"), strict=True)
)


class CaptureError(ValueError):
    """A reason why a capture can't be made; one line that names the argument or the file."""


class NotHeldError(Exception):
    """A call that the captured format can't hold; the message names the part, after "calls with"."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of softmax(scale q k^T) v, as the kernel was given it. The tensors are the model's own, detached."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d)
    v: Tensor  # (batch, key heads, keys, d)
    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float | None  # None: 1/sqrt(d)
    factor: float = 1.0  # a power of two that belongs into q: what folds another scale into 1/sqrt(d)
    sure: bool = False  # whether the function defines it so, or its arguments most likely mean it
    spans: tuple[slice, ...] = ()  # by batch entry, the tokens of its sequence; none: all of them

    @property
    def alpha(self) -> float:
        """The factor of q k^T, for q as the model has it."""
        return (1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale) * self.factor


class _Mask(NamedTuple):
    """The meaning of a mask that the captured format has words for."""

    causal: bool = False
    spans: tuple[slice, ...] = ()  # as an `AttentionCall` has them


def _read_mask(mask: Tensor, batch: int, queries: int, keys: int) -> _Mask:
    """Return the meaning of a mask that is causal, hides padding, or both. NotHeldError: it is any other mask."""
    if mask.dtype == torch.bool:
        visible, plain = mask, True
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        visible, plain = ~hidden, bool(((mask == 0) | hidden).all())
    other = NotHeldError("a mask that is neither causal nor of padding")
    try:  # of a shape that does not go with the scores: packed, or of blocks
        seen = visible[(None,) * (4 - visible.dim())].expand(batch, -1, queries, keys)
    except (IndexError, RuntimeError):
        raise other from None
    own = seen[:, :1, -1]  # the last query of a sequence sees all of its keys, and so does padding behind it
    spans = _spans(own[:, 0])
    if not plain or (seen[:, :, -1] != own).any():
        raise other
    # What padding itself sees is up to the model: it has no rows where it has keys.
    padding = ~own[:, :, :, None] if queries == keys else False
    earlier = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    for causal in (False, True):
        if ((seen == (own[:, :, None] & (earlier | (not causal)))) | padding).all():
            return _Mask(causal, spans)
    raise other


def _spans(seen: Tensor) -> tuple[slice, ...]:
    """Return where each sequence's tokens stand, of (batch, keys) that are its own; none if all are."""
    first, many = seen.int().argmax(1), seen.sum(1)
    at = torch.arange(seen.shape[1], device=seen.device)
    if (seen != ((at >= first[:, None]) & (at < (first + many)[:, None]))).any():
        raise NotHeldError("padding within a sequence")
    spans = tuple(slice(start, start + size) for start, size in torch.stack([first, many], 1).tolist())
    return () if all(span == slice(0, seen.shape[1]) for span in spans) else spans


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> AttentionCall:
    """Return a call of `torch.nn.functional.scaled_dot_product_attention`; NotHeldError: the format can't hold it."""
    del enable_gqa  # the shapes say it
    if more:
        raise NotHeldError(", ".join(more))
    q, k, v = _as_the_kernel_takes(query, key, value, dropout=dropout_p)
    mask = _Mask(is_causal)
    if attn_mask is not None:
        mask = _read_mask(attn_mask, q.shape[0], q.shape[2], k.shape[2])
    elif is_causal:  # PyTorch's flag lets query i see keys 0 .. i: the later ones take no part
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    return plain_call(q, k, v, mask, scale, sure=True)


def hugging_face_call(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> AttentionCall:
    """Return a call of one of Hugging Face's attention functions; NotHeldError: the format can't hold it.

    `eager` gets a causal mask only as a mask; all others have a flag too, the module's if the call has none.
    """
    for word, reason in _UNHELD_WORDS.items():
        if more.get(word) is not None:
            raise NotHeldError(reason)
    q, k, v = _as_the_kernel_takes(query, key, value, dropout=dropout)
    window, mask = more.get("sliding_window"), attention_mask
    if name != "eager" and window is not None and window < k.shape[2]:
        raise NotHeldError("a sliding window")
    if mask is not None and not isinstance(mask, Tensor):
        raise NotHeldError(f"a {type(mask).__name__}")
    if mask is not None and (name == "eager" or mask.dim() != 2):
        return plain_call(q, k, v, _read_mask(mask, q.shape[0], q.shape[2], k.shape[2]), scaling)
    flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = name != "eager" and bool(flag)
    if mask is not None and mask.shape != (q.shape[0], k.shape[2]):
        raise NotHeldError("padding of other tokens than K's")
    return plain_call(q, k, v, _Mask(causal, () if mask is None else _spans(mask.bool())), scaling)


def plain_call(
    q: Tensor, k: Tensor, v: Tensor, mask: _Mask, scale: float | None, *, sure: bool = False
) -> AttentionCall:
    """Return a call whose mask is known, tensors (batch, heads, tokens, d); NotHeldError: the format can't hold it."""
    q, k, v = _as_the_kernel_takes(q, k, v)
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise NotHeldError("V of another shape than K" if k.shape != v.shape else "K of another width than Q")
    if q.shape[0] != k.shape[0] or not k.shape[1] or q.shape[1] % k.shape[1] or 0 in q.shape or 0 in k.shape:
        raise NotHeldError("tensors that are empty, or whose batches or heads do not go together")
    if mask.causal and q.shape[2] > k.shape[2]:
        raise NotHeldError("a causal mask of more queries than keys")
    if mask.causal and mask.spans and q.shape[2] != k.shape[2]:
        raise NotHeldError("padding under a causal mask of fewer queries than keys")
    if scale is not None and not 0 < scale < math.inf:
        raise NotHeldError("a scale that is not positive")
    ratio = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
    power = 2.0 ** round(math.log2(ratio))
    if abs(ratio / power - 1) < _AS_DEFAULT:
        scale = None  # exact in q, so that every kernel can run it
    return AttentionCall(q, k, v, mask.causal, scale, power if scale is None else 1.0, sure, mask.spans)


def _as_the_kernel_takes(*given: Tensor, dropout: float = 0.0) -> list[Tensor]:
    """Return q, k and v, detached; under autocast in its format."""
    if dropout > 0:
        raise NotHeldError("dropout")
    for tensor in given:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
            raise NotHeldError("nested tensors" if tensor.is_nested else f"tensors of class {type(tensor).__name__}")
        if tensor.dim() not in (3, 4):
            raise NotHeldError(f"tensors of {tensor.dim()} dimensions")
    tensors, device = [tensor.detach() for tensor in given], given[0].device.type
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in _DTYPES:
        raise NotHeldError(f"tensors in {', '.join(str(tensor.dtype).removeprefix('torch.') for tensor in tensors)}")
    return [tensor if tensor.dim() == 4 else tensor[:, None] for tensor in tensors]


@dataclass(frozen=True)
class AttentionModule:
    """Facts that can't be seen of a module that computes attention: its forward takes q, k and v and returns O."""

    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float | None = None  # None: 1/sqrt(d)
    heads_first: bool = True  # tensors are (batch, heads, tokens, d); False: (batch, tokens, heads, d)


class Place(NamedTuple):
    """The place in a model where a call was made, the same in a forward pass and where a checkpoint repeats it."""

    module: str  # the innermost module that was running
    number: int  # of the call among those of one run of it


# (place, a function that makes the call of it, O, O as (batch, heads, queries, d))
OnCall = Callable[[Place, Callable[[], AttentionCall], Tensor, Callable[[Tensor], Tensor]], None]


@dataclass
class _Frame:
    name: str
    calls: int = 0
    named: bool = False  # its call is the module's own: what it calls in turn is part of it


@dataclass
class ModelWatch:
    """A hook on every call of attention of a model that reports it while `looking`, and otherwise passes it on."""

    model: nn.Module
    patterns: Mapping[str, AttentionModule]  # names or globs of modules that compute attention, as `named_modules`
    on_call: OnCall
    looking: bool = False
    _local: threading.local = field(default_factory=threading.local)  # a checkpoint's second pass has its own thread
    _hooks: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.named = named_modules(self.model, self.patterns)

    def look(self, looking: bool) -> None:
        """Start or stop reporting calls."""
        self._hooks.close()
        self._local, self.looking = threading.local(), looking
        if not looking:
            return
        for name, module in self.model.named_modules():
            before = module.register_forward_pre_hook(partial(self._enter, name))
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Intercept all calls, and restore the functions afterwards."""
        with ExitStack() as undo:
            undo.callback(self.look, False)
            original = torch.nn.functional.scaled_dot_product_attention
            watched = self._watched(original, sdpa_call, _heads_first)
            for module in [torch.nn.functional, *_sources(self.model)]:
                for name, value in list(vars(module).items()):
                    if value is original:  # there, or imported by name before this
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, watched)
                if callable(eager := vars(module).get(_EAGER)):
                    undo.callback(setattr, module, _EAGER, eager)
                    setattr(module, _EAGER, self._watched(eager, partial(hugging_face_call, "eager"), _tokens_first))
            # Hugging Face's registered functions, where some library has imported them.
            functions: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
            for key in [] if functions is None else list(functions.valid_keys()):
                if key == "sdpa" or "paged" in key:  # the first calls torch's function, the second is for inference
                    continue
                register, given = type(functions).register, functions[key]
                undo.callback(register, key, given)
                register(key, self._watched(given, partial(hugging_face_call, key), _tokens_first))
            yield

    def _watched(
        self, original: Callable[..., Any], call: Callable[..., AttentionCall], to_heads: Callable[[Tensor], Tensor]
    ) -> Callable[..., Any]:
        @wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            # A traced module is compiled: it can't be watched.
            if not self.looking or torch.compiler.is_compiling() or getattr(self._local, "inside", False):
                return original(*args, **kwargs)
            self._local.inside = True  # calls within it, or of a kernel that is asked, are not the model's
            try:
                result = original(*args, **kwargs)
                out = result[0] if isinstance(result, tuple) else result
                place = self._place()
                if place is not None and isinstance(out, Tensor):
                    self.on_call(place, lambda: call(*args, **kwargs), out, to_heads)
            finally:
                self._local.inside = False
            return result

        return attention

    @property
    def _frames(self) -> list[_Frame]:
        frames: list[_Frame] = vars(self._local).setdefault("frames", [])
        return frames

    def _place(self) -> Place | None:
        """Return the place of the call that was just made; None where it is part of another one, or a repetition."""
        frames = self._frames
        if any(frame.named for frame in frames):
            return None
        if not frames:
            # A function of no module: its repetition in the backward pass can't be recognised by its name.
            return None if torch._C._current_graph_task_id() != -1 else Place("", 0)  # as in torch.utils.checkpoint
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
            to_heads = _heads_first if how.heads_first else _tokens_first
            self.on_call(Place(frame.name, 0), lambda: _module_call(module, how, args, kwargs), out, to_heads)


def compiled_module(model: nn.Module) -> str | None:
    """Return the name of a module that is compiled, which hides its calls; None: none is."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return name or "model"
    return None


def named_modules(model: nn.Module, patterns: Mapping[str, AttentionModule]) -> dict[nn.Module, AttentionModule]:
    """Return the modules that names or globs match; CaptureError: none, or one whose forward takes no q, k and v."""
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
    return plain_call(q, k, v, _Mask(how.causal), how.scale)


def _sources(model: nn.Module) -> list[Any]:
    """Return the Python modules of a model's classes and their bases: FSDP derives a new class from one."""
    classes = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    names = dict.fromkeys(cls.__module__ for cls in classes)
    return [sys.modules[name] for name in names if name in sys.modules and sys.modules[name] is not torch.nn.functional]


def _heads_first(out: Tensor) -> Tensor:
    return out if out.dim() == 4 else out[:, None]


def _tokens_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2)
