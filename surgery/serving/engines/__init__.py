"""The serving engines that prove exports, one file each: surgery/exporting/engines.py finds them, and says what one is."""
