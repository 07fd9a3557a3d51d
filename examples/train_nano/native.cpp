// What the nano model's training spends its time on, written out for one CPU: forward and backward passes of the KDA
// recurrence (step by step, as kda.py defines it), of its short convolution, of RMSNorm, attention residuals and SiTU.
//
// Training is bound by memory traffic. One head's state is D*D floats: it stays in the first-level cache here, while the
// chunked tensor form writes dozens of intermediates to memory. Every 16 tokens the state is kept; the backward pass replays
// 16 tokens from there. All arrays are float32 and contiguous: q, k, v, decay = exp(g) [B, T, H, D], beta [B, T, H].
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef D
#define D 32
#endif
static const int SPAN = 16;

struct Shape { int64_t batch, time, heads; };

static inline int64_t row(const Shape& n, int64_t b, int64_t t, int64_t h) { return (b * n.time + t) * n.heads + h; }

// S <- diag(decay) S; u = beta (v - S^T k); S <- S + k u^T. `read` of the decayed state is left in u before scaling.
static inline void advance(float (*s)[D], const float* k, const float* v, const float* decay, float beta, float* u) {
    float read[D] = {0};
    for (int i = 0; i < D; i++)
        for (int j = 0; j < D; j++) { s[i][j] *= decay[i]; read[j] += k[i] * s[i][j]; }
    for (int j = 0; j < D; j++) u[j] = beta * (v[j] - read[j]);
}

extern "C" void kda_forward(const float* q, const float* k, const float* v, const float* decay, const float* beta,
                            float* o, float* kept, int64_t batch, int64_t time, int64_t heads) {
    const Shape n{batch, time, heads};
    const int64_t spans = (time + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < batch * heads; r++) {
        const int64_t b = r / heads, h = r % heads;
        alignas(64) float s[D][D] = {{0}};
        for (int64_t t = 0; t < time; t++) {
            if (t % SPAN == 0) std::memcpy(kept + (r * spans + t / SPAN) * D * D, s, sizeof s);
            const int64_t at = row(n, b, t, h);
            alignas(64) float u[D], out[D] = {0};
            const float *kt = k + at * D, *qt = q + at * D;
            advance(s, kt, v + at * D, decay + at * D, beta[at], u);
            for (int i = 0; i < D; i++)
                for (int j = 0; j < D; j++) { s[i][j] += kt[i] * u[j]; out[j] += qt[i] * s[i][j]; }
            std::memcpy(o + at * D, out, sizeof out);
        }
    }
}

extern "C" void kda_backward(const float* q, const float* k, const float* v, const float* decay, const float* beta,
                             const float* kept, const float* d_o, float* d_q, float* d_k, float* d_v, float* d_g, float* d_beta,
                             int64_t batch, int64_t time, int64_t heads) {
    const Shape n{batch, time, heads};
    const int64_t spans = (time + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < batch * heads; r++) {
        const int64_t b = r / heads, h = r % heads;
        alignas(64) float ds[D][D] = {{0}};
        alignas(64) float decayed[SPAN][D][D], us[SPAN][D], s[D][D];
        for (int64_t span = spans - 1; span >= 0; span--) {
            const int64_t first = span * SPAN, last = first + SPAN < time ? first + SPAN : time;
            std::memcpy(s, kept + (r * spans + span) * D * D, sizeof s);
            for (int64_t t = first; t < last; t++) {
                const int64_t at = row(n, b, t, h);
                float* u = us[t - first];
                advance(s, k + at * D, v + at * D, decay + at * D, beta[at], u);
                std::memcpy(decayed[t - first], s, sizeof s);
                for (int i = 0; i < D; i++)
                    for (int j = 0; j < D; j++) s[i][j] += k[at * D + i] * u[j];
            }
            for (int64_t t = last - 1; t >= first; t--) {
                const int64_t at = row(n, b, t, h);
                const float *qt = q + at * D, *kt = k + at * D, *dot = d_o + at * D, *u = us[t - first];
                float (*sd)[D] = decayed[t - first];
                alignas(64) float du[D] = {0}, dr[D];
                for (int i = 0; i < D; i++) {
                    float dqi = 0, dki = 0;
                    for (int j = 0; j < D; j++) {
                        dqi += (sd[i][j] + kt[i] * u[j]) * dot[j];
                        ds[i][j] += qt[i] * dot[j];
                        du[j] += kt[i] * ds[i][j];
                        dki += ds[i][j] * u[j];
                    }
                    d_q[at * D + i] = dqi;
                    d_k[at * D + i] = dki;
                }
                float dbeta = 0;
                for (int j = 0; j < D; j++) {
                    dbeta += du[j] * (beta[at] != 0 ? u[j] / beta[at] : 0);
                    dr[j] = -beta[at] * du[j];
                    d_v[at * D + j] = beta[at] * du[j];
                }
                d_beta[at] = dbeta;
                for (int i = 0; i < D; i++) {
                    float dki = 0, dgi = 0;
                    for (int j = 0; j < D; j++) {
                        dki += sd[i][j] * dr[j];
                        ds[i][j] += kt[i] * dr[j];
                        dgi += ds[i][j] * sd[i][j];
                        ds[i][j] *= decay[at * D + i];
                    }
                    d_k[at * D + i] += dki;
                    d_g[at * D + i] = dgi;
                }
            }
        }
    }
}

static const int TAPS = 4;

// y = convolution at token t of the D channels from `c`; x [T, channels] of one batch row, w [TAPS, channels], newest tap last.
static inline void convolve(const float* x, const float* w, int64_t t, int64_t c, int64_t channels, float* y) {
    for (int i = 0; i < D; i++) y[i] = 0;
    for (int j = 0; j < TAPS; j++) {
        const int64_t from = t - (TAPS - 1) + j;
        if (from < 0) continue;
        const float *xr = x + from * channels + c, *wr = w + j * channels + c;
        for (int i = 0; i < D; i++) y[i] += wr[i] * xr[i];
    }
}

// x [B, T, 3 H D] -> out [3, B, T, H, D]; part 0 (q) is normalised and scaled by D^-1/2, part 1 (k) normalised, part 2 (v) plain.
extern "C" void prepare_forward(const float* x, const float* w, float* out, int64_t batch, int64_t time, int64_t heads, float eps) {
    const int64_t groups = 3 * heads, channels = groups * D;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < batch * groups; r++) {
        const int64_t b = r / groups, group = r % groups, part = group / heads, h = group % heads;
        const float* xb = x + b * time * channels;
        for (int64_t t = 0; t < time; t++) {
            alignas(64) float y[D];
            convolve(xb, w, t, group * D, channels, y);
            float square = 0;
            for (int i = 0; i < D; i++) { y[i] = y[i] / (1 + std::exp(-y[i])); square += y[i] * y[i]; }
            const float scale = part == 2 ? 1.0f : (part == 0 ? 1 / std::sqrt((float)D) : 1.0f) / std::sqrt(square + eps);
            float* to = out + (((part * batch + b) * time + t) * heads + h) * D;
            for (int i = 0; i < D; i++) to[i] = y[i] * scale;
        }
    }
}

// d_out as out -> d_x as x, and d_w [B, TAPS, channels] (to be summed over B).
extern "C" void prepare_backward(const float* x, const float* w, const float* d_out, float* d_x, float* d_w,
                                 int64_t batch, int64_t time, int64_t heads, float eps) {
    const int64_t groups = 3 * heads, channels = groups * D;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < batch * groups; r++) {
        const int64_t b = r / groups, group = r % groups, part = group / heads, h = group % heads, c = group * D;
        const float* xb = x + b * time * channels;
        float* dx = d_x + b * time * channels;
        alignas(64) float dw[TAPS][D] = {{0}};
        for (int64_t t = 0; t < time; t++)
            for (int i = 0; i < D; i++) dx[t * channels + c + i] = 0;
        for (int64_t t = 0; t < time; t++) {
            alignas(64) float y[D], gate[D], a[D], da[D];
            const float* d = d_out + (((part * batch + b) * time + t) * heads + h) * D;
            convolve(xb, w, t, c, channels, y);
            float square = 0, along = 0;
            for (int i = 0; i < D; i++) {
                gate[i] = 1 / (1 + std::exp(-y[i]));
                a[i] = y[i] * gate[i];
                square += a[i] * a[i];
                along += a[i] * d[i];
            }
            if (part == 2) {
                for (int i = 0; i < D; i++) da[i] = d[i];
            } else {
                const float inverse = 1 / std::sqrt(square + eps), scale = part == 0 ? 1 / std::sqrt((float)D) : 1.0f;
                const float back = along * inverse * inverse;
                for (int i = 0; i < D; i++) da[i] = scale * inverse * (d[i] - a[i] * back);
            }
            for (int i = 0; i < D; i++) da[i] *= gate[i] + a[i] * (1 - gate[i]);
            for (int j = 0; j < TAPS; j++) {
                const int64_t from = t - (TAPS - 1) + j;
                if (from < 0) continue;
                const float *xr = xb + from * channels + c, *wr = w + j * channels + c;
                float* to = dx + from * channels + c;
                for (int i = 0; i < D; i++) { to[i] += wr[i] * da[i]; dw[j][i] += xr[i] * da[i]; }
            }
        }
        for (int j = 0; j < TAPS; j++) std::memcpy(d_w + (b * TAPS + j) * channels + c, dw[j], sizeof dw[j]);
    }
}

// y = x * rsqrt(mean x^2 + eps) * w for rows of `width`; the reciprocal root mean square is kept in `inverse` [rows].
extern "C" void rms_forward(const float* x, const float* w, float* y, float* inverse, int64_t rows, int64_t width, float eps) {
    for (int64_t r = 0; r < rows; r++) {
        const float* xr = x + r * width;
        float square = 0;
        for (int64_t i = 0; i < width; i++) square += xr[i] * xr[i];
        const float inv = inverse[r] = 1 / std::sqrt(square / width + eps);
        for (int64_t i = 0; i < width; i++) y[r * width + i] = xr[i] * inv * w[i];
    }
}

// d_w [width] must be zero on entry.
extern "C" void rms_backward(const float* x, const float* w, const float* inverse, const float* d_y, float* d_x, float* d_w,
                             int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const float *xr = x + r * width, *dy = d_y + r * width;
        const float inv = inverse[r];
        float along = 0;
        for (int64_t i = 0; i < width; i++) {
            along += dy[i] * w[i] * xr[i];
            d_w[i] += dy[i] * xr[i] * inv;
        }
        along *= inv * inv / width;
        for (int64_t i = 0; i < width; i++) d_x[r * width + i] = inv * (dy[i] * w[i] - xr[i] * along);
    }
}

// Attention residual of n <= 8 values v[i] [rows, width]: softmax over i of (v_i . w) / rms(v_i), then the weighted sum.
// p, raw and inverse [rows, n] are kept for the backward pass.
extern "C" void mix_forward(const float* const* v, const float* w, float* out, float* p, float* raw, float* inverse,
                            int64_t n, int64_t rows, int64_t width, float eps) {
    for (int64_t r = 0; r < rows; r++) {
        float score[8], top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            const float* vr = v[i] + r * width;
            float square = 0, dot = 0;
            for (int64_t j = 0; j < width; j++) { square += vr[j] * vr[j]; dot += vr[j] * w[j]; }
            inverse[r * n + i] = 1 / std::sqrt(square / width + eps);
            raw[r * n + i] = dot;
            score[i] = dot * inverse[r * n + i];
            top = score[i] > top ? score[i] : top;
        }
        for (int64_t i = 0; i < n; i++) sum += score[i] = std::exp(score[i] - top);
        for (int64_t i = 0; i < n; i++) {
            const float weight = p[r * n + i] = score[i] / sum, *vr = v[i] + r * width;
            float* to = out + r * width;
            if (i == 0) for (int64_t j = 0; j < width; j++) to[j] = weight * vr[j];
            else for (int64_t j = 0; j < width; j++) to[j] += weight * vr[j];
        }
    }
}

// d_w [width] must be zero on entry; d_v[i] is overwritten.
extern "C" void mix_backward(const float* const* v, const float* w, const float* p, const float* raw, const float* inverse,
                             const float* d_out, float* const* d_v, float* d_w, int64_t n, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const float* d = d_out + r * width;
        float d_p[8], mean = 0;
        for (int64_t i = 0; i < n; i++) {
            const float* vr = v[i] + r * width;
            float dot = 0;
            for (int64_t j = 0; j < width; j++) dot += d[j] * vr[j];
            d_p[i] = dot;
            mean += dot * p[r * n + i];
        }
        for (int64_t i = 0; i < n; i++) {
            const float weight = p[r * n + i], inv = inverse[r * n + i], *vr = v[i] + r * width;
            const float d_score = weight * (d_p[i] - mean), along_w = d_score * inv;
            const float along_v = -d_score * raw[r * n + i] * inv * inv * inv / width;
            float* to = d_v[i] + r * width;
            for (int64_t j = 0; j < width; j++) {
                to[j] = weight * d[j] + along_w * w[j] + along_v * vr[j];
                d_w[j] += along_w * vr[j];
            }
        }
    }
}

static inline float tanh_of(float x) { return 1 - 2 / (1 + std::exp(2 * x)); }

// SiTU: y = b tanh(g / b) sigmoid(g) l tanh(u / l); gate and up stand side by side in x [rows, 2 width].
extern "C" void situ_forward(const float* x, float* y, int64_t rows, int64_t width, float b, float l) {
    for (int64_t r = 0; r < rows; r++) {
        const float *g = x + r * 2 * width, *u = g + width;
        for (int64_t i = 0; i < width; i++)
            y[r * width + i] = b * tanh_of(g[i] / b) / (1 + std::exp(-g[i])) * l * tanh_of(u[i] / l);
    }
}

extern "C" void situ_backward(const float* x, const float* d_y, float* d_x, int64_t rows, int64_t width, float b, float l) {
    for (int64_t r = 0; r < rows; r++) {
        const float *g = x + r * 2 * width, *u = g + width, *d = d_y + r * width;
        float *dg = d_x + r * 2 * width, *du = dg + width;
        for (int64_t i = 0; i < width; i++) {
            const float s = 1 / (1 + std::exp(-g[i])), tg = tanh_of(g[i] / b), tu = tanh_of(u[i] / l);
            dg[i] = d[i] * l * tu * ((1 - tg * tg) * s + b * tg * s * (1 - s));
            du[i] = d[i] * b * tg * s * (1 - tu * tu);
        }
    }
}
