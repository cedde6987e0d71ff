"""attn_implementation="flashcore": tiny random models give the logits of "eager", with their masks."""

import copy
import os
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may be downloaded

from torch_support import Case, on_every_device  # noqa: E402

import torch  # noqa: E402

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed")

from flashcore.integrations import transformers as integration  # noqa: E402

_SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
              attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=None,
              initializer_range=0.2)


@on_every_device
class Models(Case):
    def setUp(self):
        super().setUp()
        integration.register()

    def pair(self, config, model_class):
        """The same model twice: ours and eager."""
        made = []
        for name in ("flashcore", "eager"):
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=name)
            self.assertIsInstance(model, model_class)
            self.assertEqual(model.config._attn_implementation, name)
            made.append(model.to(self.device).eval())
        made[1].load_state_dict(made[0].state_dict())
        return made

    def llama(self):
        return self.pair(transformers.LlamaConfig(**_SIZES), transformers.LlamaForCausalLM)

    def gemma(self, **options):
        return self.pair(transformers.Gemma2Config(
            **{**_SIZES, "sliding_window": 4, "attn_logit_softcapping": 5.0,
               "query_pre_attn_scalar": 16, **options}), transformers.Gemma2ForCausalLM)

    def tokens(self, batch=2, length=11):
        return torch.randint(2, 64, (batch, length), device=self.device)

    def left_padding(self, tokens):
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        return mask

    def same_logits(self, pair, tokens, mask=None):
        with torch.no_grad():
            ours, eager = (model(tokens, attention_mask=mask).logits for model in pair)
        rows = slice(None) if mask is None else mask.bool()  # what stands on padding means nothing
        self.check(ours[rows], eager[rows], factor=8)
        return ours

    def test_llama(self):
        pair = self.llama()
        self.same_logits(pair, self.tokens())

    def test_llama_with_left_padding(self):
        pair, tokens = self.llama(), self.tokens()
        masked = self.same_logits(pair, tokens, self.left_padding(tokens))
        whole = self.same_logits(pair, tokens)
        self.assertGreater(float((masked - whole)[1, -1].abs().max()), 1e-3)  # it does matter

    def test_gemma_with_window_softcap_and_padding(self):
        pair, tokens = self.gemma(), self.tokens()
        windowed = self.same_logits(pair, tokens)
        self.same_logits(pair, tokens, self.left_padding(tokens))
        wide = self.gemma(sliding_window=64)
        self.assertGreater(float((self.same_logits(wide, tokens) - windowed).abs().max()), 1e-3)
        uncapped = self.gemma(attn_logit_softcapping=None)
        self.assertGreater(float((self.same_logits(uncapped, tokens) - windowed).abs().max()), 1e-3)

    def test_cached_generation(self):
        for name, pair in (("llama", self.llama()), ("gemma", self.gemma())):
            for cache in ("dynamic", "static"):
                with self.subTest(f"{name} {cache}"):
                    tokens = self.tokens(length=6)
                    options = dict(attention_mask=self.left_padding(tokens), max_new_tokens=10,
                                   do_sample=False, return_dict_in_generate=True,
                                   output_logits=True, cache_implementation=cache)
                    ours, eager = (model.generate(tokens, **options) for model in pair)
                    self.assertTrue(torch.equal(ours.sequences, eager.sequences))
                    self.check(torch.stack(ours.logits), torch.stack(eager.logits), factor=8)

    def test_static_cache_without_mask(self):
        """transformers then relies on a causal mask aligned top-left."""
        pair, tokens = self.llama(), self.tokens(length=6)
        options = dict(max_new_tokens=4, do_sample=False, cache_implementation="static",
                       return_dict_in_generate=True, output_logits=True)
        ours, eager = (model.generate(tokens, **options) for model in pair)
        self.check(torch.stack(ours.logits), torch.stack(eager.logits), factor=8)

    def test_gradients(self):
        pair, tokens = self.llama(), self.tokens()
        for model in pair:
            model.train()
            model(tokens, labels=tokens).loss.backward()
        ours, eager = (dict(model.named_parameters()) for model in pair)
        for name in ("model.layers.0.self_attn.q_proj.weight",
                     "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"):
            self.check(ours[name].grad, eager[name].grad, factor=16)

    def test_packed_sequences_of_vision_models(self):
        q, k, v = (self.draw(1, 4, 7, 16) for _ in range(3))
        cu = self.ints(0, 3, 7)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, None, is_causal=False,
                                    cu_seq_lens_q=cu, cu_seq_lens_k=cu.long(), max_length_q=4,
                                    max_length_k=4)
        for rows in (slice(0, 3), slice(3, 7)):
            self.check(out[:, rows].transpose(1, 2),
                       self.expected(*(one[:, :, rows] for one in (q, k, v)))[0])

    def test_other_implementations_are_left_alone(self):
        integration.register()  # again
        from transformers import modeling_flash_attention_utils as utils
        with self.assertRaises((ImportError, ValueError)):
            utils._lazy_imports("flash_no_such_implementation")

    def test_sinks_and_what_cannot_be_honoured(self):
        q, k, v = self.inputs(v_dim=16)
        sinks = self.draw(4)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, None, is_causal=False, s_aux=sinks)
        self.check(out.transpose(1, 2), self.expected(q, k, v, sinks=sinks)[0])
        for options, pattern in ((dict(dropout=0.1), "dropout is 0.1"),
                                 (dict(output_attentions=True), "output_attentions"),
                                 (dict(head_mask=sinks), "head_mask: is given")):
            with self.assertRaisesRegex(NotImplementedError, pattern):
                integration.attend(torch.nn.Module(), q, k, v, None, **options)


if __name__ == "__main__":
    unittest.main()
