"""The parts of mechanisms: base classes, the shared example, explanations, costs."""
