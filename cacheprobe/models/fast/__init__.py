"""The fast forward of Hugging Face models, which records and does not edit."""
