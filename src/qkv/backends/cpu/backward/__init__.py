"""The backward kernel, and the delta correction that few queries need before it."""
