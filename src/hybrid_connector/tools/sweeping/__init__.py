"""What ``hybrid-connector sweep`` measures, keeps and draws."""
