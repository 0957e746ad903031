"""The paper's tables and figures, one recipe each."""
