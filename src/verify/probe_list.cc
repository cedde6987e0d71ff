#include "verify/probe_list.h"

#include "verify/gradient_call.h"

namespace flashcore::verify {
namespace {

std::string always(const ProbeSequence&) { return ""; }
std::string if_8bit(const ProbeSequence& p) {
  return is_8bit(p.impl.formats().dtype) ? "" : "the inputs are not 8-bit";
}
std::string if_causal(const ProbeSequence& p) { return p.can.causal ? "" : "no causal mask"; }
std::string if_window(const ProbeSequence& p) { return p.can.window ? "" : "no sliding window"; }
std::string if_softcap(const ProbeSequence& p) { return p.can.softcap ? "" : "no softcap"; }
std::string if_splits(const ProbeSequence& p) {
  return p.can.splits ? "" : "no num_splits parameter";
}
std::string if_scale(const ProbeSequence& p) {
  return p.can.scale ? "" : "no scale but the default";
}
std::string if_dlse(const ProbeSequence& p) { return p.can.dlse ? "" : "no gradient of the LSE"; }
std::string if_lse(const ProbeSequence& p) { return p.can.lse ? "" : "no LSE output"; }

using Dims = Probe::Dims;

const Probe kForward[] = {
    {"codes", "does every 8-bit encoding of V decode to its value?", probe_encodings, if_8bit,
     Dims::first},
    {"coverage", "is every output written, independent of its old content?", probe_coverage, always,
     Dims::two_if_quick, true},
    {"determinism", "does the same call return the same bits?", probe_determinism, always,
     Dims::first, true},
    {"layout", "one key: are V and out addressed correctly?", probe_layout, always, Dims::all},
    {"uniform", "Q = 0: is P = 1/n at every length?", probe_uniform, always, Dims::two_if_quick},
    {"key_layout", "Q = 0: are all keys read from the right head?", probe_key_layout, always,
     Dims::two_if_quick},
    {"scores", "do the scores read back from P match?", probe_scores, always, Dims::all},
    {"softcap", "do they match with a softcap?", probe_softcap, if_softcap, Dims::first},
    {"rescale", "ascending scores: are accumulator and sum rescaled?", probe_rescale, always,
     Dims::two_if_quick},
    {"max", "large scores: does exp() stay in range?", probe_max, always, Dims::first},
    {"mask", "causal: does every query see exactly its keys?", probe_mask, if_causal,
     Dims::two_if_quick},
    {"window", "does every query see exactly its window?", probe_window, if_window, Dims::first},
    {"combine", "are the partial results of KV splits combined correctly?", probe_combine,
     if_splits, Dims::first},
    {"bounds", "is memory outside the tensors read or written?", probe_bounds, always,
     Dims::two_if_quick},
    {"scales", "are q and k decoded correctly, with each head's own scale?", probe_scales, if_8bit,
     Dims::first},
    {"lse", "does the LSE match the scores?", probe_lse, if_lse, Dims::two_if_quick},
    {"random", "do random problems of many shapes match?", probe_random, always, Dims::first, true},
};

const Probe kGradient[] = {
    {"grad_coverage", "is every gradient written, independent of its old content?",
     probe_grad_coverage, always, Dims::all, true},
    {"grad_determinism", "does the same call return the same gradients?", probe_grad_determinism,
     always, Dims::first, true},
    {"grad_tail", "are gradients correct at every length?", probe_grad_tail, always, Dims::first},
    {"grad_layout", "are gradients addressed correctly?", probe_grad_layout, always,
     Dims::two_if_quick},
    {"grad_dv", "dout one-hot: is dv the transpose of P?", probe_grad_dv, always,
     Dims::two_if_quick},
    {"grad_dp", "uniform P, output 0: is dS = dP / n?", probe_grad_dp, always, Dims::two_if_quick},
    {"grad_delta", "uniform P: is delta subtracted?", probe_grad_delta, always, Dims::two_if_quick},
    {"grad_ds", "random scores: is dS = P (dP - delta), by dq and by dk?", probe_grad_ds, always,
     Dims::two_if_quick},
    {"grad_lse", "is P correct where the LSE is 0 or a single score?", probe_grad_lse, always,
     Dims::first},
    {"grad_accumulate", "is every tile of a long sum added once?", probe_grad_accumulate, always,
     Dims::first},
    {"grad_mask", "causal: do hidden pairs leave the gradients unchanged?", probe_grad_mask,
     if_causal, Dims::first},
    {"grad_window", "do pairs outside the window leave them unchanged?", probe_grad_window,
     if_window, Dims::first},
    {"grad_scale", "is another scale applied once?", probe_grad_scale, if_scale, Dims::first},
    {"grad_softcap", "does dS contain the derivative of the softcap?", probe_grad_softcap,
     if_softcap, Dims::first},
    {"grad_dlse", "is the gradient of the LSE added?", probe_grad_dlse, if_dlse, Dims::first},
    {"grad_max", "scores far from 0: does exp() stay in range?", probe_grad_max, always,
     Dims::first},
    {"grad_bounds", "is memory outside the tensors read or written?", probe_grad_bounds, always,
     Dims::first},
    {"grad_sizes", "are gradients of small and large dout and V correct?", probe_grad_sizes, always,
     Dims::first},
    {"grad_random", "do gradients of random problems match?", probe_grad_random, always,
     Dims::first, true},
};

}  // namespace

std::span<const Probe> forward_probes() { return kForward; }
std::span<const Probe> gradient_probes() { return kGradient; }

}  // namespace flashcore::verify
