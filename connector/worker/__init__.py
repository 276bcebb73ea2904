"""The worker side: one rank's copies between staging and its paged KV cache."""
