"""The frozen target model."""
