"""The threads that compiled jobs run on, and the gate through which foreign threads call Python."""
