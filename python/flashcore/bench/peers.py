"""The attention libraries that FlashCore is timed against."""

from collections.abc import Iterable

from flashcore.bench.peers_base import Peer
from flashcore.bench.peers_flash_attn import FlashAttention2, FlashAttention3
from flashcore.bench.peers_serving import FlashInfer, Xformers
from flashcore.bench.peers_torch import Sdpa


def known() -> dict[str, Peer]:
    """All peers by name, in the order in which they are timed."""
    return {
        "cudnn": Sdpa("CUDNN_ATTENTION"), "fa2": Sdpa("FLASH_ATTENTION"),
        "eff": Sdpa("EFFICIENT_ATTENTION"), "math": Sdpa("MATH"), "fa3": FlashAttention3(),
        "flash_attn": FlashAttention2(), "flashinfer": FlashInfer(), "xformers": Xformers(),
    }


def versions(names: Iterable[str]) -> dict[str, str]:
    """{name: version, or the reason why the peer cannot be used}."""
    peers = known()
    return {name: peers[name].missing() or peers[name].version() for name in names}
