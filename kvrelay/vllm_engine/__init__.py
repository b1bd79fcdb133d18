"""vLLM as the engine of a worker. Only workers of pools with `engine: vllm` import these modules,
and only these modules import vLLM.
"""
