"""pytest puts the folder of this file on the path: tests in the folders below import `families`."""
