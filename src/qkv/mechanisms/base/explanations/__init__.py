"""What a mechanism says of one token.

explanation      its calculation as steps with numbers, to print and as JSON
attention_steps  the steps of a softmax over scores
"""
