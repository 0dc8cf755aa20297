"""herald_jax: long-context block-diffusion LLM inference in JAX, KV cache in host memory."""
