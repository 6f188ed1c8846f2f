"""The frozen Qwen3 target and the layers that the target and the drafters share."""
