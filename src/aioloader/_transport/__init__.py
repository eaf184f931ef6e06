"""Memory for batches and messages between processes, without torch and asyncio."""
