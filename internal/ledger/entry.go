package ledger

import "strings"

// EntryBlob is the blob of a ready entry, whose only field is Field with the blob as its
// value, or the blob's head with the rest. What has other fields is no job, and its text
// can't be read as one.
func EntryBlob(fields []string) string {
	switch {
	case len(fields) != 2:
		return strings.ReplaceAll(strings.Join(fields, " "), "|", "¦")
	case fields[0] == Field:
		return fields[1]
	}
	return fields[0] + fields[1]
}

// MessageBlob does the same for an entry as go-redis gives it.
func MessageBlob(values map[string]any) string {
	if len(values) != 1 {
		return ""
	}
	for field, value := range values {
		text, _ := value.(string)
		return EntryBlob([]string{field, text})
	}
	return ""
}
