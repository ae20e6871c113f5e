"""Full attention in another order: by tiles, token by token, or device by device."""
