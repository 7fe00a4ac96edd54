"""Writing the keys and values of a step into their pages. Imports torch only."""

from torch import Tensor


def reference(kv: Tensor, layer: int, slots_N: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> None:
    """Writes token i's key and value to slot `slots_N[i]`, in place; a slot of -1 writes nothing.

    The mask makes shapes depend on data: this reference is for eager use, not for a graph.

    Args:
        kv: `[P, layers, 2, page_tokens, kv_heads, head_dim]`. layer: index within its layers.
        slots_N: i64 `[N]`, page * page_tokens + offset, each at most once. k_NGD, v_NGD: `[N,
            kv_heads, head_dim]`.
    """
    keep = slots_N >= 0
    slots = slots_N[keep]
    page_tokens = kv.shape[3]
    page, offset = slots // page_tokens, slots % page_tokens
    kv[page, layer, 0, offset] = k_NGD[keep]
    kv[page, layer, 1, offset] = v_NGD[keep]


write_kv = reference
