"""Our kernels on the smallest shapes that reach their edge cases, to be run under NVIDIA's memory checker on a GPU:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.kernels.sanitizer [NAMES]

Without PyTorch's cache every tensor is a separate allocation, so that an access outside it is detected. The race
checker (--tool racecheck) does not know mbarriers: it reports cuBLAS's Hopper kernels as well as ours, and no others.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

import kernels
from kernels.flash.portable.tiles import Tile
from kernels.history import flash1
from kernels.layers.dropout import dropout
from kernels.layers.embedding import embedding
from kernels.layers.linear_add_norm import linear_add_norm
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from kernels.layers.linear_gelu import linear_gelu
from kernels.layers.mlp import MIN_ROWS, mlp
from tests.kernels.accuracy import inputs
from tests.kernels.test_flash_gpu import features


def attend(tier: str, head_dim: int, q_len: int, kv_len: int, kv_heads: int = 4, **options: object) -> None:
    heads = {"batch": 2, "heads": 4, "kv_heads": kv_heads}
    *tensors, d_out = inputs(q_len, kv_len, head_dim, torch.bfloat16, device="cuda", **heads)
    kernels.get_attention("flash")(*tensors, tier=tier, **options).backward(d_out)


def first_algorithm(kernel: str, head_dim: int, tile: Tile) -> None:
    *tensors, d_out = inputs(512, 512, head_dim, torch.float16, device="cuda", batch=2, heads=4, kv_heads=4)
    with flash1.forced(**{kernel: tile}):
        kernels.get_attention("flash1")(*tensors, causal=False).backward(d_out)


def padding(*lengths: int) -> dict[str, torch.Tensor]:
    return {"kv_lengths": torch.tensor(lengths, dtype=torch.int32, device="cuda")}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def loss() -> None:
    targets = torch.randint(9000, (37,), device="cuda")
    linear_cross_entropy(random(37, 64), random(9024, 64), targets, 9000).backward()


def block(stream: torch.dtype, dropout_p: float = 0.0, both: bool = True) -> None:
    width = 96
    parameters = random(width, 4 * width), random(width), random(width), random(width)
    h = linear_gelu(random(37, width), random(4 * width, width), random(4 * width))
    x, h = linear_add_norm(random(37, width).to(stream), h, *parameters, dropout_p, dropout_seed=3)
    (x + h if both else h).sum().backward()


def both_linear_layers() -> None:
    mlp(random(MIN_ROWS, 64), random(128, 64), random(128), random(64, 128)).sum().backward()


def look_up() -> None:
    tokens = torch.arange(300, device="cuda") % 23 // 22 * 5  # 0, and now and then 5
    embedding(tokens, random(7, 96)).sum().backward()


def drop() -> None:
    dropout(random(37, 100), 0.1, 3).sum().backward()


def packed() -> None:
    kernels.packed_form(kernels.get_attention("flash"))(random(2, 130, 3, 4, 64)).sum().backward()


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {
        "loss": loss,
        "block": lambda: block(torch.bfloat16),
        "block of two dtypes": lambda: block(torch.float32),
        "block with dropout": lambda: block(torch.float32, dropout_p=0.1),
        "last block": lambda: block(torch.float32, both=False),
        "mlp": both_linear_layers,
        "embedding": look_up,
        "dropout": drop,
        "packed": packed,
        "hopper_grouped": lambda: attend("hopper", 64, 130, 190, kv_heads=2),
        "hopper_documents": lambda: attend(
            "hopper", 64, 1000, 1000, cu_seqlens=features()["documents"]["cu_seqlens"]
        ),
        "hopper_blocks": lambda: attend("hopper", 128, 1000, 1000, **features()["blocks"]),
        "hopper_window": lambda: attend("hopper", 128, 300, 300, window=(100, 0)),
        "hopper_dropout": lambda: attend("auto", 128, 300, 300, dropout_p=0.1, dropout_seed=3),
        "hopper_dropout_in_both": lambda: attend("hopper", 64, 300, 300, dropout_p=0.1, dropout_seed=3),
        "hopper_dropout_in_both_128": lambda: attend("hopper", 128, 300, 300, dropout_p=0.1, dropout_seed=3),
        "hopper_sinks": lambda: attend("hopper", 64, 300, 300, sinks=torch.zeros(4, device="cuda")),
        "hopper_sinks_in_a_window": lambda: attend(
            "hopper", 128, 300, 300, **features()["sinks in a window"]
        ),
        "hopper_padding": lambda: attend("hopper", 64, 300, 300, **padding(0, 190)),
        "hopper_padding_128": lambda: attend(
            "hopper", 128, 130, 190, kv_heads=2, causal=False, **padding(189, 1)
        ),
        "hopper_padding_three_consumers": lambda: attend("hopper", 64, 4100, 4100, **padding(4099, 2000)),
        "hopper_padding_dropout": lambda: attend(
            "hopper", 64, 300, 300, dropout_p=0.1, dropout_seed=3, **padding(300, 190)
        ),
        "hopper_precise_delta": lambda: attend("hopper", 64, 130, 190, precise_delta=True),
        "hopper_precise_delta_256": lambda: attend("hopper", 256, 130, 190, precise_delta=True),
        "hopper_precise_delta_dropout": lambda: attend(
            "hopper", 128, 300, 300, causal=False, precise_delta=True, dropout_p=0.1, dropout_seed=3
        ),
        "hopper_precise_delta_padding": lambda: attend(
            "hopper", 64, 300, 300, precise_delta=True, **padding(0, 190)
        ),
        "hopper_softcap": lambda: attend("hopper", 64, 130, 190, kv_heads=2, softcap=30.0),
        "hopper_softcap_in_a_window": lambda: attend("hopper", 128, 300, 300, softcap=30.0, window=(100, 0)),
        "hopper_softcap_padding": lambda: attend("hopper", 64, 300, 300, softcap=30.0, **padding(0, 190)),
        "hopper_softcap_256": lambda: attend("hopper", 256, 300, 300, softcap=30.0),
        "hopper_alibi": lambda: attend("hopper", 64, 300, 300, alibi_slopes=torch.rand(4, device="cuda")),
        "hopper_alibi_full": lambda: attend(
            "hopper", 128, 130, 190, kv_heads=2, causal=False, alibi_slopes=torch.rand(4, device="cuda")
        ),
        "hopper_window_of_unequal_lengths": lambda: attend("hopper", 64, 130, 400, window=(50, 0)),
        "hopper_wide_window": lambda: attend("hopper", 256, 130, 400, window=(50, 0)),
        "hopper_wide_softcap_in_a_window": lambda: attend(
            "hopper", 160, 300, 300, kv_heads=2, softcap=30.0, window=(100, 0)
        ),
        "hopper_wide_documents": lambda: attend(
            "hopper", 256, 1000, 1000, cu_seqlens=features()["documents"]["cu_seqlens"]
        ),
        "hopper_wide_padding": lambda: attend("hopper", 256, 300, 300, **padding(0, 190)),
        "hopper_wide_padding_full": lambda: attend(
            "hopper", 160, 130, 190, kv_heads=2, causal=False, **padding(189, 1)
        ),
        "hopper_wide_padding_claimed": lambda: attend("hopper", 192, 2100, 2100, **padding(1111, 2099)),
        "hopper_wide_sinks": lambda: attend("hopper", 256, 130, 190, sinks=torch.zeros(4, device="cuda")),
        "hopper_wide_dropout": lambda: attend("hopper", 256, 300, 300, dropout_p=0.1, dropout_seed=3),
        "hopper_wide_dropout_full": lambda: attend(
            "hopper", 160, 130, 194, kv_heads=2, causal=False, dropout_p=0.1, dropout_seed=3
        ),
        "hopper_wide_dropout_precise": lambda: attend(
            "hopper", 136, 300, 300, kv_heads=2, precise_delta=True, dropout_p=0.1, dropout_seed=3
        ),
        "hopper_wide_alibi_padding": lambda: attend(
            "hopper", 160, 130, 194, alibi_slopes=torch.rand(4, device="cuda"), **padding(189, 1)
        ),
        "hopper_wide_alibi": lambda: attend(
            "hopper", 256, 130, 190, causal=False, alibi_slopes=torch.rand(4, device="cuda")
        ),
        "hopper_own_offsets": lambda: attend(
            "hopper", 64, 1000, 1000, **features()["keys of their own offsets"]
        ),
        "hopper_own_offsets_128": lambda: attend(
            "hopper", 128, 1000, 1000, causal=False, **features()["keys of their own offsets"]
        ),
        "hopper_documents_padding": lambda: attend(
            "hopper", 64, 1000, 1000, **features()["documents with padding"]
        ),
        "hopper_wide_documents_padding": lambda: attend(
            "hopper", 256, 1000, 1000, **features()["documents with padding"]
        ),
        "hopper_full_window": lambda: attend(
            "hopper", 128, 130, 700, kv_heads=2, causal=False, window=(90, 20)
        ),
        "hopper_full_window_to_the_left": lambda: attend(
            "hopper", 64, 300, 300, causal=False, window=(90, 0)
        ),
        "hopper_wide_full_window": lambda: attend("hopper", 256, 300, 300, causal=False, window=(90, 20)),
        "hopper_window_padding": lambda: attend("hopper", 64, 300, 500, window=(90, 0), **padding(433, 1)),
        "hopper_wide_full_window_padding": lambda: attend(
            "hopper", 256, 300, 130, causal=False, window=(90, 20), **padding(77, 130)
        ),
        "hopper_claimed": lambda: attend("hopper", 128, 2100, 2100),
        "hopper_padded": lambda: attend("hopper", 72, 130, 190, kv_heads=2),
        "hopper_wide_padded": lambda: attend("hopper", 136, 130, 190, kv_heads=2),
        "hopper_wide_claimed": lambda: attend("hopper", 256, 2100, 2100),
    }
    for tier in ("hopper", "triton"):
        for head_dim in (64, 128, 256):
            for causal in (True, False):
                name = f"{tier}_{head_dim}_{'causal' if causal else 'full'}"
                found[name] = lambda args=(tier, head_dim, 130, 190), causal=causal: attend(
                    *args, causal=causal
                )
    for (kernel, head_dim), tiles in flash1.CANDIDATES.items():
        for tile in tiles:
            found[f"flash1, {kernel} {head_dim}, {tile}"] = partial(first_algorithm, kernel, head_dim, tile)
    for name, options in features().items():
        found[name] = lambda options=options: attend("triton", 64, 1000, 1000, **options)
    return found


if __name__ == "__main__":
    every = cases()
    for name in sys.argv[1:] or every:
        if name not in every:
            sys.exit(f"{name} is unknown; there are {', '.join(every)}")
        every[name]()
        torch.cuda.synchronize()
        print(name, flush=True)
