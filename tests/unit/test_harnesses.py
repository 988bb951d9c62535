"""The adapters in examples/harnesses, called as their harnesses call them, and what public judges pass."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tiebreak
from tiebreak.kernels.external import users_kernel
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.external.options import declared_options
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference
from tiebreak.reports.errors import UsageError

HARNESSES = Path(__file__).parents[2] / "examples" / "harnesses"
MODEL = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, Q, K, V): return "
Kernel = Callable[..., Any]
Harness = Callable[..., Any]


class Asked(NamedTuple):
    """A verdict of one call, in the place of a whole run's."""

    ok: bool
    device: str


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What `tiebreak.check` was asked: whether the function that an adapter gives it computes attention."""
    verdicts: list[Asked] = []

    def check(function: Kernel | str, *, device: object, declare: tuple[str, ...] = (), **options: Any) -> Asked:
        assert options["budget"] == "60s"
        function = load(function) if isinstance(function, str) else function
        caller = users_kernel("given", function, declared_options(function, declare)).caller
        generator = torch.Generator().manual_seed(1)
        q, k, v, do = (torch.randn(2, 4, 8, 16, generator=generator).bfloat16().float() for _ in range(4))
        inputs = AttentionInputs(q, k, v, do, Formats.of(BF16), causal=caller.convention.causal is not None)
        o = caller.started(inputs, gradients=False).o
        verdicts.append(Asked(bool((o - reference(inputs).o).abs().max() < 0.05), str(device)))
        return verdicts[-1]

    monkeypatch.setattr(tiebreak, "check", check, raising=False)
    return verdicts


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Loads an adapter beside upstream's modules, of which each has what the adapter takes from it."""

    def adapter(name: str, upstream: dict[str, dict[str, Any]]) -> Any:
        for path, names in upstream.items():
            module = ModuleType(path)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, path, module)
            if parent := path.rpartition(".")[0]:
                setattr(sys.modules[parent], path.rpartition(".")[2], module)
        spec = importlib.util.spec_from_file_location(f"harness_{name}", HARNESSES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return adapter


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def zeros(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    return torch.zeros_like(q)


@pytest.fixture(params=[attention, zeros])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_flashinfer_bench_is_told_of_ragged_prefill_that_returns_or_writes_into_tensors(
    kernel: Kernel, asked: list[Asked], harness: Harness
) -> None:
    """Its own check passes, and the evaluation that it is given in the place of None makes a solution incorrect."""

    class DefaultEvaluator:
        @classmethod
        def check_correctness(cls, *given: Any) -> tuple[str, None]:
            return "correctness", None

    upstream: dict[str, dict[str, Any]] = {
        "flashinfer_bench": {},
        "flashinfer_bench.bench": {},
        "flashinfer_bench.bench.evaluators": {"DefaultEvaluator": DefaultEvaluator},
        "flashinfer_bench.bench.evaluators.registry": {"_EVALUATORS": []},
        "flashinfer_bench.bench.utils": {"make_eval": lambda status, device, log_path, correctness: status},
        "flashinfer_bench.data": {"EvaluationStatus": SimpleNamespace(INCORRECT_NUMERICAL="incorrect")},
    }
    harness("flashinfer_bench_evaluator", upstream)
    (evaluator,) = upstream["flashinfer_bench.bench.evaluators.registry"]["_EVALUATORS"]
    assert evaluator.can_evaluate(
        SimpleNamespace(inputs=dict.fromkeys(["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"]))
    )
    assert not evaluator.can_evaluate(SimpleNamespace(inputs={"q": None, "k": None, "v": None}))
    for writes in (True, False):

        def run(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, of_keys: Tensor, scale: float, *out: Tensor) -> Any:
            assert (ends.tolist(), of_keys.tolist()) == ([0, len(q)], [0, len(k)])
            o = kernel(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale)[0].transpose(0, 1)
            return out[0].copy_(o) if out else (o, None)

        run.metadata = SimpleNamespace(destination_passing_style=writes)  # type: ignore[attr-defined]
        judged = evaluator.check_correctness(None, run, [], [], None, "log", "cpu")
        assert judged == ("correctness", None if kernel is attention else "incorrect")
    assert asked == [Asked(kernel is attention, "cpu")] * 2


def test_kernel_bench_runs_a_models_source(kernel: Kernel, asked: list[Asked], harness: Harness) -> None:
    def upstreams(original: str, custom: str, **options: Any) -> SimpleNamespace:
        assert options == {"precision": torch.bfloat16, "device": "cpu"}
        return SimpleNamespace(correctness=True, metadata={})

    names = {"KernelExecResult": None, "eval_kernel_against_ref": upstreams,
             "get_torch_dtype_from_string": {"bf16": torch.bfloat16}.get}  # fmt: skip
    module = harness("kernelbench_eval", {"kernelbench": {}, "kernelbench.eval": names})
    o = "torch.nn.functional.scaled_dot_product_attention(Q, K, V)" if kernel is attention else "torch.zeros_like(Q)"
    result = module.eval_attention_against_ref("", MODEL + o, device="cpu")
    assert (result.correctness, result.metadata) == (kernel is attention, {"tiebreak": str(asked[0])})


def test_hugging_faces_runner_verifies_with_what_it_is_given(
    kernel: Kernel, asked: list[Asked], harness: Harness
) -> None:
    upstream = {"kernels": {}, "kernels.benchmark": {"Benchmark": type("Benchmark", (), {"device": "cpu"})}}
    benchmark = harness("hf_kernels_benchmark", upstream).TiebreakAttentionBenchmark()

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, None]:
        return kernel(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2), None

    benchmark.kernel = SimpleNamespace(flash_attn_func=flash_attn_func)
    benchmark.setup()
    benchmark.benchmark_attention()
    verified = [torch.allclose(benchmark.out, benchmark.verify_attention(), atol=1e-2) for _ in range(2)]
    assert verified == [kernel is attention] * 2
    assert len(asked) == 1


def test_gpu_modes_check_has_the_submissions_kernel(kernel: Kernel, asked: list[Asked], harness: Harness) -> None:
    upstream = {
        "utils": {"make_match_reference": lambda *_, **limits: lambda data, output: (True, "")},
        "submission": {"custom_kernel": lambda data: kernel(*data)},
    }
    module = harness("gpu_mode_reference", upstream)
    data = tuple(torch.zeros(1, 1, 2, 4) for _ in range(3))
    assert module.check_implementation(data, data[0]) == (kernel is attention, str(asked[0]))


def test_backend_bench_judges_attention_operators_once_each(
    kernel: Kernel, asked: list[Asked], harness: Harness
) -> None:
    def upstreams(op: object, impl: Kernel, test: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(is_correct=True, error_type="", error_msg="")

    names = {"eval_correctness_test": upstreams}
    harness("backendbench_eval", {"BackendBench": {}, "BackendBench.eval": names})
    judge = sys.modules["BackendBench.eval"].eval_correctness_test
    test = SimpleNamespace(args=tuple(torch.zeros(1, 1, 2, 4) for _ in range(3)))
    results = [judge(op, kernel, test) for op in ("aten.scaled_dot_product_attention.default",) * 2]
    assert [result.is_correct for result in results] == [kernel is attention] * 2
    assert judge("aten.relu.default", kernel, test).is_correct
    assert len(asked) == 1


def test_tensors_on_a_device_that_is_not_here_are_one_line() -> None:
    with pytest.raises(UsageError, match=r"^--backend: torch:mps can't run here: .*$"):
        tiebreak.check(attention, device="mps:0", in_process=True)


def test_public_judges_pass_what_is_no_attention(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one head: what passes there is not a matter of chance."""
    monkeypatch.setitem(sys.modules, "tabulate", SimpleNamespace(tabulate=None))
    module = harness("zeros", {})
    monkeypatch.setattr(module, "HEADS", 1)
    told = {
        judge.name.split()[0]: [judge.verdict(each).partition(",")[0] for each in module.KERNELS]
        for judge in module.JUDGES
        if judge.shape[2] < 1024
    }
    page = (HARNESSES / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    for name, verdicts in told.items():
        assert [row[1:] for row in rows if name in row[0] and len(row) == 5] == [verdicts], name
    assert len(told) == 4
