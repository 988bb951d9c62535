"""The features that inputs may need of a kernel, and that a kernel may declare: one vocabulary for both."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A property of inputs beyond attention with equal numbers of heads in which every query sees every key."""

    name: str  # how it is called
    words: str  # after "takes no", in the reason of a skip
    taken: str = ""  # what `takes` of a user's kernel calls it; empty: no such kernel takes it
    keywords: tuple[str, ...] = ()  # common parameters that it goes by as a value: `AttentionInputs.value_of` gives it
    parts: int = 1  # how many of them, the first ones, are given together: each further one is another name
    trains: bool = True  # whether K and V, as they are held, are what gradients can be of
    in_fp32: bool = False  # whether its numbers are fp32 in a call of any format
    variant_of: str = ""  # a feature, as `takes` calls it, whose kernels are tried with this one


CAUSAL = Feature("causal", "causal mask", "causal")
GROUPED = Feature("grouped", "grouped-query heads", "gqa", ("enable_gqa",))
# Aligned at its lower right.
OBLONG_CAUSAL = Feature("oblong causal", "causal mask of fewer or more queries than keys", "oblong_causal")
# Given as a number of keys of each sequence where there is no mask, or where keys are paged.
KEY_PADDING = Feature("key padding", "key padding mask", "padding", ("cache_seqlens", "seqused_k"))
OWN_ENDS = Feature("own ends", "causal mask that ends with each sequence's own keys", "own_ends")
BLIND_ROWS = Feature("blind rows", "row without a visible key", "blind_rows")
OWN_SCALE = Feature(
    "own scale", "scale of the scores other than 1/sqrt(d)", "scale", ("scale", "sm_scale", "softmax_scale", "scaling")
)
VALUE_DIM = Feature("value dimension", "head dimension of V other than q's", "value_dim")
WINDOW = Feature("window", "sliding window", "window", ("window_size", "sliding_window", "window"))
SOFTCAP = Feature("soft cap", "soft cap of the scores", "softcap", ("softcap", "logits_soft_cap", "logit_cap"))
SINK = Feature("sink", "learned sink", "sink", ("sink", "sinks", "s_aux", "learnable_sink"))
ALIBI = Feature("ALiBi", "slopes of ALiBi", "alibi", ("alibi_slopes",), in_fp32=True)
OWN_SLOPES = Feature("own slopes", "slopes of ALiBi by sequence", "own_slopes", variant_of="alibi")
CAPPED_BIAS = Feature("capped bias", "bias under a soft cap", "capped_bias")  # as ONNX has it: c tanh((s + bias) / c)
BIAS = Feature("bias", "bias of the scores", "bias", ("attn_bias", "bias", "score_bias"))
LENGTHS = Feature(
    "lengths",
    "packed sequences (cu_seqlens_q and the like; cache_seqlens is padding)",
    "lengths",
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    parts=4,
)
_BLOCKS = ("blockmask", "block_size", "base_blockmask", "block_sparse_mask")
BLOCK_MASK = Feature("block mask", "block mask", "block_mask", _BLOCKS, parts=2)
PAGES = Feature("pages", "paged keys", "pages", ("block_table", "block_tables", "page_table"), trains=False)
_SCALES, _EIGHT_BITS = ("k_descale", "v_descale"), "K and V in fp8 with descale factors"
DESCALE = Feature("descale", _EIGHT_BITS, "descale", _SCALES, parts=2, trains=False, in_fp32=True)
HIDDEN_NAN = Feature("hidden NaN", "NaN at a key that a mask hides", "hidden_nan")
MIXED_FORMATS = Feature("mixed formats", "operands or output in another format than its inputs")
FEATURES = (
    *(CAUSAL, GROUPED, OBLONG_CAUSAL, KEY_PADDING, OWN_ENDS, BLIND_ROWS, OWN_SCALE, HIDDEN_NAN, MIXED_FORMATS),
    *(OWN_SLOPES, CAPPED_BIAS, VALUE_DIM, WINDOW, SOFTCAP, SINK, BIAS, ALIBI, LENGTHS, BLOCK_MASK, PAGES, DESCALE),
)
# Features with a value in every call; others have one where inputs need it, or a kernel has no default.
ALWAYS_GIVEN = frozenset({GROUPED, OWN_SCALE})

# Features that depend on a key's place in the call: dummies would change what they mean.
PLACED = frozenset({WINDOW, BIAS, ALIBI, LENGTHS, BLOCK_MASK, PAGES, OWN_ENDS})

# Features that only hide scores: a kernel that takes a mask of scores takes them all.
MASKS = frozenset({CAUSAL, OBLONG_CAUSAL, KEY_PADDING, OWN_ENDS, BLIND_ROWS, WINDOW, LENGTHS, BLOCK_MASK})

# Features of kernels that mask each score separately. What is added above later does not belong in here: each kernel
# that takes it declares so itself, and the others' cells are skipped.
COMMON = frozenset({CAUSAL, GROUPED, OBLONG_CAUSAL, KEY_PADDING, BLIND_ROWS, OWN_SCALE})

# What a script of `tiebreak shrink`, with torch alone, has words for.
SCRIPTABLE = frozenset({CAUSAL, GROUPED, OBLONG_CAUSAL, BLIND_ROWS, OWN_SCALE, MIXED_FORMATS})
