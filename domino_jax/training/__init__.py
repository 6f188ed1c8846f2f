"""Loss, schedules and the jitted training step."""
