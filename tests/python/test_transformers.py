"""attn_implementation="flashcore": tiny random models give the logits of "eager", with all masks."""

import copy
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

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
        """The same model with "flashcore" and with "eager"."""
        made = []
        for name in ("flashcore", "eager"):
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=name)
            self.assertIsInstance(model, model_class)
            self.assertEqual(model.config._attn_implementation,
                             integration.PLAIN_NAME if name == "flashcore" else name)
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
        rows = slice(None) if mask is None else mask.bool()  # logits of padding are undefined
        self.check(ours[rows], eager[rows], factor=8)
        return ours

    def test_llama(self):
        pair = self.llama()
        self.same_logits(pair, self.tokens())

    def test_llama_with_left_padding(self):
        pair, tokens = self.llama(), self.tokens()
        masked = self.same_logits(pair, tokens, self.left_padding(tokens))
        whole = self.same_logits(pair, tokens)
        self.assertGreater(float((masked - whole)[1, -1].abs().max()), 1e-3)  # the mask has an effect

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
        """Without a mask, transformers expects top-left causal alignment."""
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

    def test_varlen_sequences_of_vision_models(self):
        q, k, v = (self.draw(1, 4, 7, 16) for _ in range(3))
        cu = self.ints(0, 3, 7)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, None, is_causal=False,
                                    cu_seq_lens_q=cu, cu_seq_lens_k=cu.long(), max_length_q=4,
                                    max_length_k=4)
        for rows in (slice(0, 3), slice(3, 7)):
            self.check(out[:, rows].transpose(1, 2),
                       self.expected(*(one[:, :, rows] for one in (q, k, v)))[0])

    def varlen(self, **options):
        """attend() on two sequences in one row. Returns q, k, v, the result, and the rows of each sequence."""
        q, k, v = self.draw(1, 4, 17, 16), self.draw(1, 2, 17, 16), self.draw(1, 2, 17, 16)
        cu = self.ints(0, 7, 17)
        mask = options.pop("attention_mask", None)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu,
                                    max_length_q=10, max_length_k=10, **options)
        return q, k, v, out.transpose(1, 2), (slice(0, 7), slice(7, 17))

    def check_varlen(self, options, wanted):
        """wanted(rows): options of the reference for these rows."""
        q, k, v, out, sequences = self.varlen(**options)
        for rows in sequences:
            self.check(out[:, :, rows], self.expected(*(one[:, :, rows] for one in (q, k, v)),
                                                      **wanted(rows))[0])

    def test_varlen_sinks(self):
        sinks = self.draw(4)
        for causal in (False, True):
            self.check_varlen(dict(is_causal=causal, s_aux=sinks),
                              lambda rows: dict(causal=causal, sinks=sinks))

    def test_varlen_windows(self):
        """The window of a non-causal model has two sides."""
        self.check_varlen(dict(is_causal=False, sliding_window=3), lambda rows: dict(window=(2, 2)))
        self.check_varlen(dict(is_causal=True, sliding_window=3),
                          lambda rows: dict(causal=True, window=(2, -1)))

    def test_varlen_position_bias(self):
        bias = self.draw(1, 4, 17, 17)
        for causal in (False, True):
            self.check_varlen(dict(is_causal=causal, position_bias=bias, sliding_window=4),
                              lambda rows: dict(bias=bias[:, :, rows, rows], causal=causal,
                                                window=(3, -1 if causal else 3)))

    def test_varlen_with_a_mask(self):
        keep = torch.rand(1, 1, 17, 17, device=self.device) > 0.4
        keep |= torch.eye(17, dtype=torch.bool, device=self.device)
        for options in (dict(is_causal=False), dict(is_causal=True, sliding_window=2)):
            self.check_varlen(dict(attention_mask=keep, **options),  # it includes causality and windows
                              lambda rows: dict(mask=keep[:, :, rows, rows]))
        added = torch.where(keep, 0.5, -1e30)
        self.check_varlen(dict(is_causal=False, attention_mask=added),
                          lambda rows: dict(mask=keep[:, :, rows, rows]))
        q, cu = self.draw(2, 4, 5, 16), self.ints(0, 5, 10)
        for query, key in ((q, q), (q[:1], self.draw(1, 4, 7, 16))):  # keys outside of all sequences
            with self.assertRaisesRegex(NotImplementedError, "wanted a batch of 1 and as many keys"):
                integration.attend(torch.nn.Module(), query, key, key, None, cu_seq_lens_q=cu,
                                   cu_seq_lens_k=cu, position_bias=self.draw(1, 4, 5, key.shape[2]))

    def test_varlen_gradients(self):
        """Gradients of sinks and of a position bias, compared with the sequences alone."""
        sinks, bias = self.draw(4, grad=True), self.draw(1, 4, 17, 17, grad=True)
        q, k, v, out, sequences = self.varlen(is_causal=False, s_aux=sinks, position_bias=bias)
        ours = torch.autograd.grad(out.square().sum(), (sinks, bias))
        total = 0.0
        for rows in sequences:
            alone, _ = integration.attend(torch.nn.Module(), q[:, :, rows], k[:, :, rows], v[:, :, rows],
                                          None, is_causal=False, s_aux=sinks,
                                          position_bias=bias[:, :, rows, rows])
            total = total + alone.square().sum()
        for got, want in zip(ours, torch.autograd.grad(total, (sinks, bias))):
            self.check(got, want, factor=8)

    def test_keys_chosen_by_an_indexer(self):
        q, k, v = self.inputs(v_dim=16)
        mask = torch.ones(2, 1, 5, 9, dtype=torch.bool, device=self.device).tril(4)
        chosen = torch.argsort(torch.rand(2, 5, 9, device=self.device), -1)[..., :3]
        chosen[..., 0] = 0  # every query sees the first key
        keep = mask & torch.zeros_like(mask).scatter(-1, chosen.unsqueeze(1), True)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, mask, indices=chosen.int())
        self.check(out.transpose(1, 2), self.expected(q, k, v, mask=keep)[0])
        with self.assertRaisesRegex(NotImplementedError, "indices: is given without"):
            integration.attend(torch.nn.Module(), q, k, v, None, indices=chosen)

    def test_a_sink_for_each_query(self):
        q, k, v = self.inputs(v_dim=16)
        sinks = self.draw(2, 4, 5, 1)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, None, is_causal=False, sinks=sinks)
        groups = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) / 4
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        self.check(out.transpose(1, 2), weights @ v.repeat_interleave(groups, 1))

    def refused(self, config, auto=transformers.AutoModelForCausalLM):
        with self.assertRaisesRegex(ValueError, "cannot use attn_implementation=\"flashcore\""):
            auto.from_config(config, attn_implementation="flashcore")
        return auto.from_config(config, attn_implementation="eager")  # the config itself is valid

    def test_models_that_never_call_the_attention(self):
        """These models would add our boolean masks to their scores."""
        self.refused(transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4))
        self.refused(transformers.CodeGenConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=4, rotary_dim=8))
        self.refused(transformers.MptConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4))
        self.refused(transformers.XGLMConfig(vocab_size=64, d_model=64, ffn_dim=96, num_layers=2,
                                             attention_heads=4))
        self.refused(transformers.MPNetConfig(**_SIZES), transformers.AutoModelForMaskedLM)

    def test_models_that_call_it_in_one_part_only(self):
        sizes = dict(vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=96,
                     decoder_ffn_dim=96, encoder_attention_heads=4, decoder_attention_heads=4)
        self.refused(transformers.BigBirdPegasusConfig(**sizes), transformers.AutoModelForSeq2SeqLM)
        self.refused(transformers.GitConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1,
                                            num_attention_heads=4, intermediate_size=96,
                                            vision_config=dict(hidden_size=64, num_hidden_layers=1,
                                                               num_attention_heads=4)))

    def test_falcon_with_alibi(self):
        """Falcon's module for flash_attn does not support ALiBi."""
        model = transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=True,
            bos_token_id=1, eos_token_id=None), attn_implementation="flashcore").to(self.device)
        with self.assertRaisesRegex(ValueError, "alibi"):
            model(self.tokens())

    def test_set_attn_implementation(self):
        """The same rules apply to an existing model."""
        ours, eager = self.llama()
        eager.set_attn_implementation("flashcore")
        self.assertEqual(eager.config._attn_implementation, integration.PLAIN_NAME)
        pegasus = self.refused(transformers.BigBirdPegasusConfig(
            vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=96,
            decoder_ffn_dim=96, encoder_attention_heads=4, decoder_attention_heads=4),
            transformers.AutoModelForSeq2SeqLM)
        with self.assertRaisesRegex(ValueError, "cannot use attn_implementation"):
            pegasus.set_attn_implementation("flashcore")

    def same_outputs(self, make, inputs, read):
        """make(implementation) returns a model. The same weights must give the output of "eager"."""
        found = []
        for name in ("flashcore", "eager"):
            torch.manual_seed(3)
            model = make(name).to(self.device).eval()
            with torch.no_grad():
                found.append(read(model(**inputs)))
        self.check(found[0], found[1], factor=16)

    def test_bark(self):
        """Bark has its own module for flash_attn, which needs that package's masks."""
        sizes = dict(block_size=64, input_vocab_size=64, output_vocab_size=64, num_layers=2, num_heads=4,
                     hidden_size=64, dropout=0.0)
        tokens = self.tokens()
        for config, model, inputs in (
                (transformers.BarkSemanticConfig(**sizes), transformers.BarkSemanticModel,
                 dict(input_ids=tokens)),
                (transformers.BarkFineConfig(**sizes, n_codes_total=4, n_codes_given=1),
                 transformers.BarkFineModel,
                 dict(codebook_idx=2, input_ids=torch.stack([tokens] * 4, -1)))):
            for mask in (None, self.left_padding(tokens)):
                rows = slice(None) if mask is None else mask.bool()
                self.same_outputs(
                    lambda name: model._from_config(copy.deepcopy(config), attn_implementation=name),
                    {**inputs, "attention_mask": mask}, lambda out: out.logits[rows])

    def test_vision_tower_with_two_images(self):
        """The patches of both images are one row of a varlen call."""
        config = transformers.Qwen2VLConfig(vision_config=dict(depth=2, embed_dim=32, hidden_size=64,
                                                               num_heads=2)).vision_config
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
        calls = []
        original = integration._varlen
        integration._varlen = lambda *arguments: calls.append(1) or original(*arguments)
        self.addCleanup(setattr, integration, "_varlen", original)
        grid = torch.tensor([[1, 4, 4], [1, 2, 6]], device=self.device)
        self.same_outputs(
            lambda name: Qwen2VisionTransformerPretrainedModel._from_config(copy.deepcopy(config),
                                                                            attn_implementation=name),
            dict(hidden_states=self.draw(28, 3 * 2 * 14 * 14), grid_thw=grid),
            lambda out: out.last_hidden_state)
        self.assertEqual(len(calls), 2)  # one for each layer

    def test_names(self):
        """Models run under PLAIN_NAME unless they pass varlen sequences only to names with "flash"."""
        vision = transformers.Qwen2VLConfig(text_config=dict(**{**_SIZES, "num_hidden_layers": 1}),
                                            vision_config=dict(depth=1, embed_dim=32, hidden_size=64,
                                                               num_heads=2))
        for asked in ("flashcore", integration.PLAIN_NAME):
            model = transformers.AutoModelForImageTextToText.from_config(copy.deepcopy(vision),
                                                                         attn_implementation=asked)
            self.assertEqual(model.config.vision_config._attn_implementation, "flashcore")
            llama = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_SIZES),
                                                                  attn_implementation=asked)
            self.assertEqual(llama.config._attn_implementation, integration.PLAIN_NAME)

    def test_other_implementations_are_unchanged(self):
        integration.register()  # again
        from transformers import modeling_flash_attention_utils as utils
        with self.assertRaises((ImportError, ValueError)):
            utils._lazy_imports("flash_no_such_implementation")

    def test_sinks_and_refused_options(self):
        q, k, v = self.inputs(v_dim=16)
        sinks = self.draw(4)
        out, _ = integration.attend(torch.nn.Module(), q, k, v, None, is_causal=False, s_aux=sinks)
        self.check(out.transpose(1, 2), self.expected(q, k, v, sinks=sinks)[0])
        for options, pattern in ((dict(dropout=0.1), "dropout is 0.1"),
                                 (dict(output_attentions=True), "output_attentions"),
                                 (dict(head_mask=sinks), "head_mask: is given")):
            with self.assertRaisesRegex(NotImplementedError, pattern):
                integration.attend(torch.nn.Module(), q, k, v, None, **options)


    def test_the_usual_call(self):
        """It has a path of its own, with the bits of the general one."""
        module = torch.nn.Module()
        cases = ((dict(), {}), (dict(q_len=1), {}), (dict(), dict(is_causal=False)),
                 (dict(), dict(sliding_window=3, softcap=5.0, scaling=0.3)),
                 (dict(v_dim=8), dict(position_ids=None)))
        for sizes, options in cases:
            with self.subTest(f"{sizes} {options}"):
                sizes = {"q_len": 9, "kv_len": 9, "v_dim": 16} | sizes
                inputs = [one.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                          for one in self.inputs(**sizes)]
                found = []
                for way in (mock.Mock(wraps=integration.to_rows), mock.Mock(return_value=None)):
                    with mock.patch.object(integration, "to_rows", way):
                        out, _ = integration.attend(module, *inputs, None, **options)
                        with torch.no_grad():
                            alone, _ = integration.attend(module, *inputs, None, **options)
                    self.assertEqual(way.call_count, 2)
                    self.assertTrue(out.is_contiguous() and torch.equal(out, alone))
                    found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
                for one, other in zip(*found):
                    self.assertTrue(torch.equal(one, other))


class Benchmark(unittest.TestCase):
    def test_figures(self):
        tree = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, tree / "bench" / "transformers_model.py", "--device", "cpu", "--size", "2", "16",
             "--layers", "2", "--width", "64", "--heads", "4", "2", "--vocabulary", "64", "--rounds", "2", "--json"],
            text=True, env={**os.environ, "PYTHONPATH": str(tree / "python")}, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual([one["case"] for one in found], ["train", "prefill", "decode"])
        for one in found:
            self.assertEqual((one["batch"], one["tokens"]), (2, 16))
            self.assertLessEqual(one["lowest"], one["ratio"])
        self.assertGreater(max(one["difference"] for one in found), 0)  # the two models use different kernels


if __name__ == "__main__":
    unittest.main()
