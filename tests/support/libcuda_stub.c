/* A libcuda.so.1 that answers CUDA_ERROR_NOT_INITIALIZED to everything: kvikio then takes every buffer for host memory.
 * For tests of the kvikio backend on machines without the driver; see test_kvikio.py. */

#define CUDA_ERROR_NOT_INITIALIZED 3
#define NOT_INITIALIZED(name) \
  int name(void) { return CUDA_ERROR_NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

NOT_INITIALIZED(cuInit)
NOT_INITIALIZED(cuCtxCreate_v4)
NOT_INITIALIZED(cuCtxDestroy_v2)
NOT_INITIALIZED(cuCtxGetCurrent)
NOT_INITIALIZED(cuCtxGetDevice)
NOT_INITIALIZED(cuCtxPopCurrent_v2)
NOT_INITIALIZED(cuCtxPushCurrent_v2)
NOT_INITIALIZED(cuDeviceGet)
NOT_INITIALIZED(cuDeviceGetAttribute)
NOT_INITIALIZED(cuDeviceGetCount)
NOT_INITIALIZED(cuDevicePrimaryCtxRelease_v2)
NOT_INITIALIZED(cuDevicePrimaryCtxRetain)
NOT_INITIALIZED(cuEventCreate)
NOT_INITIALIZED(cuEventDestroy_v2)
NOT_INITIALIZED(cuEventQuery)
NOT_INITIALIZED(cuEventRecord)
NOT_INITIALIZED(cuEventSynchronize)
NOT_INITIALIZED(cuGetErrorName)
NOT_INITIALIZED(cuGetErrorString)
NOT_INITIALIZED(cuLaunchHostFunc)
NOT_INITIALIZED(cuMemFreeHost)
NOT_INITIALIZED(cuMemGetAddressRange_v2)
NOT_INITIALIZED(cuMemHostAlloc)
NOT_INITIALIZED(cuMemHostRegister_v2)
NOT_INITIALIZED(cuMemHostUnregister)
NOT_INITIALIZED(cuMemcpyAsync)
NOT_INITIALIZED(cuMemcpyBatchAsync)
NOT_INITIALIZED(cuMemcpyBatchAsync_v2)
NOT_INITIALIZED(cuMemcpyDtoHAsync_v2)
NOT_INITIALIZED(cuMemcpyHtoDAsync_v2)
NOT_INITIALIZED(cuPointerGetAttribute)
NOT_INITIALIZED(cuPointerGetAttributes)
NOT_INITIALIZED(cuStreamCreate)
NOT_INITIALIZED(cuStreamDestroy_v2)
NOT_INITIALIZED(cuStreamSynchronize)
