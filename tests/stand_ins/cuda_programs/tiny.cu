// SPDX-License-Identifier: Apache-2.0
// A real program, made by nvcc: ten launches and a copy. Without a GPU each gives an error, and says which.
#include <cstdio>

template <typename T> __global__ void scale(T *data, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		data[i] *= 2;
}

int main()
{
	char byte = 0;
	std::puts("ready");
	std::fflush(stdout);
	std::getchar();
	int failed = 0;
	for (int i = 0; i < 10; i++) {
		scale<float><<<4, 64>>>(nullptr, 0);
		failed += cudaGetLastError() != cudaSuccess;
	}
	int copied = cudaMemcpy(&byte, &byte, 1, cudaMemcpyDefault);
	std::printf("%d of 10 launches failed, the copy gave %d\n", failed, copied);
	return 0;
}
