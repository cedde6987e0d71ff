/* A complete attention function for `flashcore verify`.
 *
 *   cc -shared -fPIC -O2 -I include examples/verify_me.c -o libverify_me.so -lm
 *   flashcore verify --lib ./libverify_me.so --symbol attention
 *   flashcore verify --lib ./libverify_me.so --symbol split_attention
 *
 * `attention` is correct, and so is its backward pass, which the verifier finds by its name.
 * `split_attention` combines KV splits incorrectly: it multiplies each partial output twice by the
 * sum of its split. */
#include <flashcore/verify_c.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static float* at(const flashcore_tensor* t, int64_t b, int64_t h, int64_t i, int64_t c) {
  return (float*)t->data + b * t->strides[0] + h * t->strides[1] + i * t->strides[2] +
         (t->ndim > 3 ? c * t->strides[3] : 0);
}

/* Keys begin ... end - 1 of one row: maximum, sum and unnormalised output [v_dim]. */
static void attend(const flashcore_verify_call* call, int64_t b, int64_t h, int64_t i,
                   int64_t begin, int64_t end, float* max, float* sum, float* out) {
  const int64_t group = call->q->shape[1] / call->k->shape[1], v_dim = call->v->shape[3];
  const int64_t position = i + call->k->shape[2] - call->q->shape[2];
  *max = -INFINITY;
  *sum = 0;
  memset(out, 0, (size_t)v_dim * sizeof *out);
  for (int64_t j = begin; j < end; ++j) {
    if (call->causal && j > position) break;
    float score = 0;
    for (int64_t c = 0; c < call->q->shape[3]; ++c) {
      score += *at(call->q, b, h, i, c) * *at(call->k, b, h / group, j, c);
    }
    score *= (float)call->scale;
    const float before = *max;
    if (score > *max) *max = score;
    const float old = before == -INFINITY ? 0 : expf(before - *max), weight = expf(score - *max);
    *sum = *sum * old + weight;
    for (int64_t c = 0; c < v_dim; ++c) {
      out[c] = out[c] * old + weight * *at(call->v, b, h / group, j, c);
    }
  }
}

static int32_t run(const flashcore_verify_call* call, int sums_twice) {
  if (call->q->dtype.code != FLASHCORE_FLOAT || call->q->dtype.bits != 32 || call->softcap > 0 ||
      call->window_left >= 0 || call->window_right >= 0) {
    return FLASHCORE_UNSUPPORTED;
  }
  const int64_t n = call->k->shape[2], v_dim = call->v->shape[3];
  const int64_t splits = call->num_splits > 0 ? call->num_splits : 1;
  const int64_t size = (n + splits - 1) / splits;
  float* part = malloc(2 * (size_t)v_dim * sizeof *part);
  float* all = part + v_dim;
  for (int64_t b = 0; b < call->q->shape[0]; ++b) {
    for (int64_t h = 0; h < call->q->shape[1]; ++h) {
      for (int64_t i = 0; i < call->q->shape[2]; ++i) {
        float max = -INFINITY, sum = 0;
        memset(all, 0, (size_t)v_dim * sizeof *all);
        for (int64_t begin = 0; begin < n; begin += size) {
          float max_i, sum_i;
          attend(call, b, h, i, begin, begin + size < n ? begin + size : n, &max_i, &sum_i, part);
          if (sum_i == 0) continue; /* no key of this split is visible */
          const float top = max_i > max ? max_i : max;
          const float old = sum == 0 ? 0 : expf(max - top), weight = expf(max_i - top);
          const float twice = sums_twice && splits > 1 ? sum_i : 1;
          sum = sum * old + sum_i * weight;
          for (int64_t c = 0; c < v_dim; ++c) all[c] = all[c] * old + part[c] * weight * twice;
          max = top;
        }
        for (int64_t c = 0; c < v_dim; ++c) *at(call->out, b, h, i, c) = sum > 0 ? all[c] / sum : 0;
        if (call->lse) *at(call->lse, b, h, i, 0) = sum > 0 ? max + logf(sum) : -INFINITY;
      }
    }
  }
  free(part);
  return FLASHCORE_OK;
}

int32_t attention(const flashcore_verify_call* call, void* user) {
  (void)user;
  return run(call, 0);
}

static float dot(const flashcore_tensor* a, int64_t b, int64_t ha, int64_t i,
                 const flashcore_tensor* other, int64_t ho, int64_t j) {
  float sum = 0;
  for (int64_t c = 0; c < a->shape[3]; ++c) sum += *at(a, b, ha, i, c) * *at(other, b, ho, j, c);
  return sum;
}

static void clear(const flashcore_tensor* t) {
  for (int64_t b = 0; b < t->shape[0]; ++b) {
    for (int64_t h = 0; h < t->shape[1]; ++h) {
      for (int64_t i = 0; i < t->shape[2]; ++i) {
        for (int64_t c = 0; c < t->shape[3]; ++c) *at(t, b, h, i, c) = 0;
      }
    }
  }
}

int32_t attention_backward(const flashcore_verify_backward_call* call, void* user) {
  (void)user;
  const flashcore_verify_call* f = call->forward;
  if (f->q->dtype.code != FLASHCORE_FLOAT || f->q->dtype.bits != 32 || f->softcap > 0 ||
      f->window_left >= 0 || f->window_right >= 0) {
    return FLASHCORE_UNSUPPORTED;
  }
  const int64_t n = f->k->shape[2], group = f->q->shape[1] / f->k->shape[1];
  const float scale = (float)f->scale;
  clear(call->dq), clear(call->dk), clear(call->dv);
  for (int64_t b = 0; b < f->q->shape[0]; ++b) {
    for (int64_t h = 0; h < f->q->shape[1]; ++h) {
      for (int64_t i = 0; i < f->q->shape[2]; ++i) {
        const int64_t position = i + n - f->q->shape[2], g = h / group;
        float delta = dot(call->dout, b, h, i, f->out, h, i);
        if (call->dlse) delta -= *at(call->dlse, b, h, i, 0);
        for (int64_t j = 0; j < n; ++j) {
          if (f->causal && j > position) break;
          const float score = scale * dot(f->q, b, h, i, f->k, g, j);
          const float p = expf(score - *at(f->lse, b, h, i, 0));
          const float ds = p * (dot(call->dout, b, h, i, f->v, g, j) - delta);
          for (int64_t c = 0; c < f->v->shape[3]; ++c) {
            *at(call->dv, b, g, j, c) += p * *at(call->dout, b, h, i, c);
          }
          for (int64_t c = 0; c < f->q->shape[3]; ++c) {
            *at(call->dq, b, h, i, c) += scale * ds * *at(f->k, b, g, j, c);
            *at(call->dk, b, g, j, c) += scale * ds * *at(f->q, b, h, i, c);
          }
        }
      }
    }
  }
  return FLASHCORE_OK;
}

int32_t split_attention(const flashcore_verify_call* call, void* user) {
  (void)user;
  return run(call, 1);
}
