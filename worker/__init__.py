"""One engine on one accelerator: paged KV cache, prefix cache, scheduler, model, server."""
