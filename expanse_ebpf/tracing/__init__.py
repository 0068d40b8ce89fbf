"""Deep traces: windows in which every CUDA and NCCL call of a job is seen. Outside of them nothing is there."""
