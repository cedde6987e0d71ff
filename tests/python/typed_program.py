"""A program that uses the public interface of FlashCore. `scripts/lint --types` checks it as a user's type
checker would. It is never run."""

from typing import Any

from typing_extensions import assert_type

import flashcore
from flashcore import flash_attn
from flashcore.integrations import transformers


def calls(q: Any, k: Any, v: Any) -> None:
    flashcore.attention(q, k, v, causal=True, window=(4, 0), scale=0.5, layout="bshd")
    flashcore.append(q, q, k, v, q, block_table=None)
    flashcore.merge([q], [q], return_lse=True)
    flashcore.sdpa(q, k, v, is_causal=True)
    flash_attn.flash_attn_func(q, k, v, 0.0, None, True, window_size=[4, 0])
    transformers.register()
    assert_type(flashcore.explain(q, k, v), str)
    assert_type(flashcore.__version__, str)


def library() -> None:
    found = flashcore.load()
    assert_type(found, flashcore.Library)
    assert_type(found.cuda_device_count(), tuple[int, str])
    assert_type(found.fingerprint(), str | None)


def verdict(function: Any) -> str:
    report = flashcore.verify(function, layout="bshd", supports=["gqa"])
    assert_type(report, flashcore.Report)
    assert_type(report.stage, str | None)
    assert_type([probe.seconds for probe in report.probes], list[float])
    return report.to_json()
