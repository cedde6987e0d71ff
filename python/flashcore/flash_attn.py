"""Drop-in for the flash_attn package: the calls of flashcore.compat.flash_attn."""

from flashcore.compat.flash_attn import (flash_attn_func, flash_attn_varlen_func,
                                         flash_attn_with_kvcache)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
