"""Deep traces: windows in which every CUDA and NCCL call of a job is seen, and outside of them nothing."""
