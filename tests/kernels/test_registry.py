"""How a run gets its attention: by name, checked before the first step. Under 1 s."""

import functools
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

import kernels
from kernels import AttentionError, AttentionRequest, register_attention, resolve_attention
from tests.conftest import INTERPRETED

CPU = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        AttentionError,
        match=r"attention=flahs is unknown; choose one of auto, .*flash, .*flex",
    ):
        resolve_attention("flahs", **CPU)


def test_get_attention_refuses_auto() -> None:
    with pytest.raises(AttentionError, match="use resolve_attention"):
        kernels.get_attention("auto")


@pytest.mark.parametrize(
    ("name", "why"),
    [("sdpa", "attention=sdpa is registered already"), ("auto", "attention=auto chooses among")],
)
def test_a_name_is_registered_once(name: str, why: str) -> None:
    before = dict(kernels.ATTENTION)
    with pytest.raises(AttentionError, match=why):
        register_attention(name, refuses=lambda request: None)
    assert before == kernels.ATTENTION


@pytest.mark.parametrize("given", ["refuses", "breaks"])
def test_what_is_asked_of_a_backend_is_a_function(given: str) -> None:
    with pytest.raises(AttentionError, match=rf"must be a function .*: {given}=lambda request: True"):
        register_attention("never", **{"refuses": lambda request: None, given: True})


def test_auto_on_a_cpu_resolves_to_sdpa() -> None:
    name, attention = resolve_attention("auto", **CPU)
    assert name == "sdpa"
    assert attention is kernels.get_attention("sdpa")


@pytest.mark.gpu
def test_auto_on_a_gpu_is_flash_but_for_head_dims_where_sdpa_is_faster() -> None:
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert resolve_attention("auto", **gpu, head_dim=128)[0] == "flash"
    assert resolve_attention("auto", **gpu, head_dim=208)[0] == "sdpa"
    assert resolve_attention("auto", **gpu, head_dim=192, causal=False)[0] == "sdpa"
    for head_dim in (136, 192, 256):
        on_hopper = kernels.attention_tier("flash", **gpu, head_dim=head_dim) == "hopper"
        auto, _ = resolve_attention("auto", **gpu, head_dim=head_dim, causal=True)
        assert auto == ("flash" if on_hopper else "sdpa")
    assert resolve_attention("auto", **gpu, head_dim=256, softcap=5.0)[0] == "flash"
    assert resolve_attention("auto", **gpu, head_dim=256, cu_seqlens=True)[0] == "flash"


def test_auto_takes_none_of_torchs_unmeasured_packed_documents_on_a_gpu() -> None:
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 300}  # more than flash takes
    assert resolve_attention("auto", **gpu)[0] == "sdpa"
    assert resolve_attention("auto", **gpu, cu_seqlens=True)[0] == "naive"
    assert resolve_attention("sdpa", **gpu, cu_seqlens=True)[0] == "sdpa"


def test_auto_skips_a_backend_that_lacks_a_requested_feature() -> None:
    assert resolve_attention("auto", **CPU, window=(8, 0))[0] == "naive"


@pytest.mark.parametrize("features", [{"window": (-1, -1)}, {"window": [-1, -1]}, {"softcap": None}], ids=str)
def test_a_value_that_means_none_asks_for_nothing(features: dict[str, object]) -> None:
    """Neither auto, nor a backend that is named, nor its function minds it."""
    assert resolve_attention("auto", **CPU, **features)[0] == "sdpa"
    q = torch.randn(1, 2, 20, 64)
    for name in ("sdpa", "naive", "chunked"):
        _, attention = resolve_attention(name, **CPU, **features)
        assert torch.equal(attention(q, q, q, **features), attention(q, q, q))


def test_a_refusal_names_the_reason_and_the_nearest_backend() -> None:
    with pytest.raises(
        AttentionError,
        match=r"attention=sdpa cannot be used here: it does not support window; use attention=",
    ):
        resolve_attention("sdpa", **CPU, window=(8, 0))


@pytest.mark.parametrize("name", ["chunked", "auto"])
def test_a_refusal_says_what_the_argument_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.registry, "PREFERENCE", ("chunked",))
    with pytest.raises(AttentionError, match=r"supports? cu_seqlens \(packed documents\)"):
        resolve_attention(name, **CPU, cu_seqlens=True)


def test_features_that_are_off_do_not_rule_out_a_backend() -> None:
    assert resolve_attention("sdpa", **CPU, dropout_p=0.0, window=None, return_lse=False)[0] == "sdpa"


def test_a_misspelled_feature_is_refused() -> None:
    with pytest.raises(AttentionError, match="unknown attention argument droput_p"):
        resolve_attention("naive", **CPU, droput_p=0.1)
    with pytest.raises(AttentionError, match=r"argument is_causal; choose one of causal, .*, window"):
        kernels.get_attention("sdpa")(*torch.zeros(3, 1, 1, 4, 8), is_causal=True)  # torch's name


def test_a_dtype_by_its_name_is_refused() -> None:
    with pytest.raises(AttentionError, match=r"dtype must be a torch\.dtype such as torch\.float32, got 'bf"):
        resolve_attention("auto", **CPU | {"dtype": "bfloat16"})


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient", "flex", "fa4"])
def test_backends_for_cuda_refuse_a_cpu(name: str) -> None:
    with pytest.raises(AttentionError, match=f"attention={name} cannot be used here: .*use attention=sdpa"):
        resolve_attention(name, **CPU)


OPTIONS = {
    "dropout_p": 0.1, "window": (4, 0), "softcap": 5.0, "alibi_slopes": torch.ones(2), "sinks": torch.zeros(2),
    "cu_seqlens": torch.tensor([0, 5, 16], dtype=torch.int32), "kv_lengths": torch.tensor([3, 8], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 9, 16], dtype=torch.int32),
    "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "return_lse": True, "precise_delta": True,
}  # fmt: skip


# Except those in Triton, which need the interpreter.
EVERY_BACKEND = pytest.mark.parametrize(
    "name", sorted(set(kernels.ATTENTION) - {"flash", "flash1", "two_pass"})
)


@EVERY_BACKEND
def test_a_query_alone_sees_what_it_saw_among_all(name: str) -> None:
    """As when text is generated, one query for all keys so far."""
    try:
        _, attention = resolve_attention(name, **CPU)
    except AttentionError:
        pytest.skip("it takes a GPU")
    q, k, v = torch.randn(3, 2, 2, 8, 64)
    torch.testing.assert_close(attention(q[:, :, -1:], k, v), attention(q, k, v)[:, :, -1:])


@pytest.mark.parametrize("feature", [None, *kernels.features.FEATURES])
@EVERY_BACKEND
@pytest.mark.filterwarnings("ignore")  # torch's, of why it has no kernel
def test_a_call_is_answered_or_refused_in_a_line_of_ours(name: str, feature: str | None) -> None:
    """Of a backend from get_attention, where nothing is resolved before."""
    q, k, v = (torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(3))
    options = {feature: OPTIONS[feature]} if feature else {}
    if feature == "cu_seqlens_k":
        options |= {"cu_seqlens": OPTIONS["cu_seqlens"]}
    refused = ""
    try:
        kernels.get_attention(name)(q, k, v, dropout_seed=1, **options)
    except AttentionError as error:
        refused = str(error)
    assert re.fullmatch(f"(attention={name}[: ].+)?", refused)


@pytest.mark.parametrize("feature", [None, *sorted(set(kernels.features.FEATURES) - {"dropout_p"})])
@EVERY_BACKEND
@pytest.mark.filterwarnings("ignore")  # torch's, of why it has no kernel
def test_what_a_backend_lets_through_is_computed_as_naive_does(name: str, feature: str | None) -> None:
    """Output and gradients. With dropout a backend may draw other random numbers."""
    options = {feature: OPTIONS[feature]} if feature else {}
    if feature == "cu_seqlens_k":
        options |= {"cu_seqlens": OPTIONS["cu_seqlens"]}
    try:
        _, attention = resolve_attention(name, **CPU | {"head_dim": 16}, **options)
    except AttentionError:
        pytest.skip("it refuses")
    q, k, v = (torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(3))
    d_out, found = torch.randn(2, 2, 8, 16), []
    for function in (attention, kernels.get_attention("naive")):
        outs = function(q, k, v, **options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        loss = (outs[0] * d_out).sum() + sum(each.sum() for each in outs[1:])
        found.append((*outs, *torch.autograd.grad(loss, (q, k, v))))
    torch.testing.assert_close(*found)


def test_flash_without_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        AttentionError, match=r"needs a CUDA device, not cpu \(TRITON_INTERPRET=1, .*use attention=sdpa"
    ):
        resolve_attention("flash", **CPU)


def test_flash_in_the_interpreter_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AttentionError, match="interpreter multiplies bfloat16 wrongly"):
        resolve_attention("flash", device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64)


def test_one_decorated_function_registers_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.registry, "ATTENTION", dict(kernels.ATTENTION))

    def refuses(request: AttentionRequest) -> str | None:
        return "it needs an even head_dim" if request.head_dim % 2 else None

    @register_attention("mean", refuses=refuses)
    def mean(q, k, v, **options):
        return v.mean(-2, keepdim=True).expand_as(q)

    assert resolve_attention("mean", **CPU) == ("mean", mean)
    with pytest.raises(AttentionError, match="an even head_dim; use attention=sdpa"):
        resolve_attention("mean", device=torch.device("cpu"), dtype=torch.float32, head_dim=3)


def test_bound_options_apply_to_the_packed_form_too() -> None:
    def attention(**options: object) -> object:
        return "apart", options

    def packed(**options: object) -> object:
        return "packed", options

    kernels.with_packed(attention, packed)
    bound = kernels.bind(kernels.bind(attention, tier="triton"), precise_delta=True)
    assert bound() == ("apart", {"tier": "triton", "precise_delta": True})
    assert kernels.packed_form(bound)() == ("packed", {"tier": "triton", "precise_delta": True})
    assert kernels.packed_form(kernels.bind(len)) is None


def test_a_wrapped_attention_has_no_packed_form() -> None:
    """Calling the packed form of what it wraps would bypass the wrapper."""
    flash = kernels.get_attention("flash")
    assert kernels.packed_form(flash) is not None

    @functools.wraps(flash)
    def wrapper(q, k, v, **options):
        return flash(q, k, v, **options)

    assert kernels.packed_form(wrapper) is None


def test_import_brings_neither_triton_nor_the_compiler() -> None:
    code = "import sys, kernels; print('triton' in sys.modules, 'torch._dynamo' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert printed.stdout.split() == ["False", "False"]


@INTERPRETED
@pytest.mark.parametrize(
    ("name", "tier", "reason"),
    [
        ("sdpa", "hopper", r"it has no kernel tiers \(leave out attention.tier=hopper"),
        ("flash", "hoper", "attention.tier=hoper is none of auto, triton, hopper"),
        ("flash", "hopper", "attention.tier=hopper needs a Hopper GPU"),
        ("auto", "hopper", r"^attention=auto: attention\.tier=hopper needs a Hopper GPU [^;]*what serves\)$"),
    ],
)
def test_an_unavailable_tier_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, tier: str, reason: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AttentionError, match=reason):
        resolve_attention(name, **CPU, tier=tier)


@INTERPRETED
def test_auto_with_a_tier_resolves_to_flash_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_attention("auto", **CPU, tier="triton")[0] == "flash"


def test_options_that_every_attention_takes_may_be_requested() -> None:
    options = {"causal": False, "scale": 0.2, "dropout_p": 0.1, "dropout_seed": 3}
    _, attention = resolve_attention("auto", **CPU, **options)
    q = torch.randn(1, 2, 20, 64)
    assert attention(q, q, q, **options).shape == q.shape


def test_flex_can_be_pickled_though_it_runs_compiled() -> None:
    attention = kernels.get_attention("flex")
    assert pickle.loads(pickle.dumps(attention)) is attention


@pytest.mark.parametrize("name", ["naive", "sdpa", "sdpa_math"])
def test_an_attention_can_be_pickled_with_its_model(name: str) -> None:
    q = torch.randn(1, 2, 20, 64)
    attention = kernels.get_attention(name)
    assert torch.equal(pickle.loads(pickle.dumps(attention))(q, q, q), attention(q, q, q))


@pytest.mark.parametrize("name", ["chunked", "naive", "sdpa", "sdpa_math"])
def test_autocast_casts_the_inputs_of_every_attention_to_its_dtype(name: str) -> None:
    torch._dynamo.reset()  # no graph of another test counts
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    attention = kernels.get_attention(name)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(q.bfloat16(), k, v.half())  # from layers that autocast casts, and that it does not
        assert attention(q.double(), k.double(), v.double()).dtype is torch.float64
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)(q.bfloat16(), k, v.half())
    assert mixed.dtype is torch.bfloat16
    assert torch.equal(mixed, attention(*(x.bfloat16() for x in (q, k, v.half()))))
    assert compiled.dtype is torch.bfloat16
    torch.testing.assert_close(compiled, mixed)


@pytest.mark.parametrize("name", ["chunked", "flash", "naive", "sdpa", "sdpa_math"])
def test_meta_tensors_give_a_meta_result_of_the_same_shape(name: str) -> None:
    q = torch.empty(1, 2, 20, 16, device="meta")
    out = kernels.get_attention(name)(q, q, q)
    assert (out.shape, out.device.type) == (q.shape, "meta")


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), (300, torch.float32), (64, torch.float64)]
)
def test_flash_refuses_meta_tensors_that_a_gpu_would_refuse(head_dim: int, dtype: torch.dtype) -> None:
    q = torch.empty(1, 2, 20, head_dim, device="meta", dtype=dtype)
    with pytest.raises(AttentionError, match="attention=flash: it takes"):
        kernels.flash_attention(q, q, q)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what would run on a GPU where there is none")
def test_what_would_run_on_a_gpu_can_be_asked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    there = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    for head_dim in (64, 192, 256):
        assert resolve_attention("auto", **there, head_dim=head_dim)[0] in ("flash", "sdpa")
    assert kernels.attention_tier("flash", **there, head_dim=64) == "triton"
    assert kernels.why_portable("flash", **there, head_dim=64) is None
    with pytest.raises(AttentionError, match="a Hopper GPU"):
        resolve_attention("flash", **there, head_dim=64, tier="hopper")


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("name", ["flash", "naive", "sdpa", "flex", "chunked", "flash1", "two_pass"])
def test_causal_is_true_or_false(name: str, documents: bool) -> None:
    """None, which would mean False, may be meant as the default, True."""
    q, given = torch.randn(1, 2, 20, 16), {"cu_seqlens": torch.tensor([0, 20]).int()} if documents else {}
    if documents and name in ("chunked", "flash1", "two_pass"):
        pytest.skip("it has none")
    with pytest.raises(AttentionError, match="causal must be True or False, got None"):
        kernels.get_attention(name)(q, q, q, causal=None, **given)


@pytest.mark.parametrize("name", ["flash", "naive", "sdpa"])
@pytest.mark.parametrize("place", [0, 1, 2], ids="qkv".__getitem__)
def test_what_is_no_tensor_is_named(name: str, place: int) -> None:
    given = [torch.randn(1, 2, 20, 16)] * 3
    given[place] = None
    with pytest.raises(AttentionError, match="q, k and v must be tensors, got NoneType"):
        kernels.get_attention(name)(*given)


LATE = """
import os, triton
os.environ["TRITON_INTERPRET"] = "1"
import torch
from kernels import AttentionError, resolve_attention
try:
    resolve_attention("flash", device=torch.device("cpu"), dtype=torch.float32, head_dim=16)
except AttentionError as error:
    print(error)
import kernels
x = torch.empty(1, 2, 20, 16, device="meta")
os.environ["TRITON_INTERPRET"] = "0"
print(kernels.flash_attention(x, x, x).shape)
"""


def test_an_interpreter_that_is_asked_for_too_late_is_named_and_meta_tensors_need_none() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    late, meta = run.stdout.splitlines()
    assert "it needs TRITON_INTERPRET=1 to be set before triton is imported" in late
    assert meta == "torch.Size([1, 2, 20, 16])"


def test_an_unknown_tier_is_reported_before_missing_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AttentionError, match=r"attention\.tier=foo is none of auto, triton, hopper"):
        resolve_attention("flash", **CPU, tier="foo")


def test_attention_tier_names_the_tier_in_use_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.attention_tier("flash", **CPU) == "triton"
    assert kernels.attention_tier("sdpa", **CPU) is None
