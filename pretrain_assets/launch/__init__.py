"""The job contract between an orchestrator and the GPU node, and the launchers that keep it.

Invariant: a launched run leaves nothing behind. When its launcher is cancelled or killed, every process of it ends.
"""
