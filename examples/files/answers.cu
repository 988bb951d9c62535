// The same on a GPU: nvcc -std=c++17 -O2 answers.cu -o answers && ./answers FOLDER
// It compiles with nvcc 13.0. Nobody has run it on a GPU.
#include "answers.cpp"

#include <cstdio>
#include <cstdlib>

void checked(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
        std::exit(1);
    }
}

// YOURS. This one has a thread a row, and sums in fp32.
__global__ void rows(const float* q, const float* k, const float* v, float* o, int heads, int key_heads, int queries,
                     int keys, int d, int value_d, float scale, bool causal, int count) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= count) return;
    const int i = row % queries, head = row / queries;
    const size_t shared = head / heads * key_heads + head % heads / (heads / key_heads);
    const int seen = causal ? min(max(i + 1 + keys - queries, 0), keys) : keys;
    float top = -INFINITY, l = 0;
    o += size_t(row) * value_d;
    for (int c = 0; c < value_d; ++c) o[c] = 0;
    for (int j = 0; j < seen; ++j) {
        float s = 0;
        for (int c = 0; c < d; ++c) s += q[size_t(row) * d + c] * k[(shared * keys + j) * d + c];
        const float higher = fmaxf(top, s * scale), kept = expf(top - higher), p = expf(s * scale - higher);
        top = higher;
        l = l * kept + p;
        for (int c = 0; c < value_d; ++c) o[c] = o[c] * kept + p * v[(shared * keys + j) * value_d + c];
    }
    for (int c = 0; c < value_d; ++c) o[c] /= seen ? l : 1;
}

void attention(const Tensor& q, const Tensor& k, const Tensor& v, float scale, bool causal, float* o) {
    const int count = q.b * q.h * q.n;
    float* on_device[4];
    const float* given[] = {q.x.data(), k.x.data(), v.x.data()};
    const size_t sizes[] = {q.x.size() * 4, k.x.size() * 4, v.x.size() * 4, size_t(count) * v.d * 4};
    for (int at = 0; at < 4; ++at) checked(cudaMalloc(&on_device[at], sizes[at]));
    for (int at = 0; at < 3; ++at) checked(cudaMemcpy(on_device[at], given[at], sizes[at], cudaMemcpyHostToDevice));
    rows<<<(count + 127) / 128, 128>>>(on_device[0], on_device[1], on_device[2], on_device[3], q.h, k.h, q.n, k.n, q.d,
                                       v.d, scale, causal, count);
    checked(cudaGetLastError());
    checked(cudaMemcpy(o, on_device[3], sizes[3], cudaMemcpyDeviceToHost));
    for (float* each : on_device) checked(cudaFree(each));
}
