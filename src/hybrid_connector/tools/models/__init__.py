"""What would vLLM's engines hold for a model, by its config.json alone?"""
