"""The attention libraries that FlashCore is timed against."""

from collections.abc import Iterable

from flashcore.bench.peers_base import Peer
from flashcore.bench.peers_flash_attn import FlashAttention2, FlashAttention3
from flashcore.bench.peers_serving import FlashInfer, Xformers
from flashcore.bench.peers_torch import Sdpa


_CPU_MATH_BYTES = 5e7  # limit of the attention matrix of "math"; a CPU takes too long for larger ones


def known(device: str = "cuda") -> dict[str, Peer]:
    """All peers of a device by name, in the order in which they are timed."""
    if device == "cpu":
        return {"torch": Sdpa(), "math": Sdpa("MATH", _CPU_MATH_BYTES), "fa2": Sdpa("FLASH_ATTENTION")}
    return {
        "cudnn": Sdpa("CUDNN_ATTENTION"), "fa2": Sdpa("FLASH_ATTENTION"),
        "eff": Sdpa("EFFICIENT_ATTENTION"), "math": Sdpa("MATH"), "fa3": FlashAttention3(),
        "fa3_det": FlashAttention3(deterministic=True),
        "flash_attn": FlashAttention2(), "flashinfer": FlashInfer(), "xformers": Xformers(),
    }


def versions(names: Iterable[str], device: str = "cuda") -> dict[str, str]:
    """{name: version, or the reason why the peer cannot be used}."""
    peers = known(device)
    return {name: peers[name].missing() or peers[name].version() for name in names}
