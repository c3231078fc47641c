// Renders a Helm chart as `helm template` does, for tests on machines without Helm:
//
//	render [-f values.yaml]... [--set key=value,...]... [--namespace name] [--notes] RELEASE CHART
//
// It checks the values by the chart's schema with the library that Helm uses, and prints the manifests, or the notes.
// Not included: subcharts, hooks, library charts, --set-string and its relatives.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/xeipuuv/gojsonschema"
	"sigs.k8s.io/yaml"
)

type options struct {
	release, chart, namespace string
	files, sets               []string
	notes                     bool
}

func main() {
	text, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
	fmt.Print(text)
}

func run(arguments []string) (string, error) {
	given, err := parse(arguments)
	if err != nil {
		return "", err
	}
	chart, err := load(given.chart)
	if err != nil {
		return "", err
	}
	values, err := chart.values(given)
	if err != nil {
		return "", err
	}
	rendered, err := chart.render(given, values)
	if err != nil {
		return "", err
	}
	if given.notes {
		return rendered["NOTES.txt"], nil
	}
	return manifests(rendered), nil
}

func parse(arguments []string) (options, error) {
	given := options{namespace: "default"}
	var positional []string
	for len(arguments) > 0 {
		word := arguments[0]
		arguments = arguments[1:]
		if word == "--notes" {
			given.notes = true
			continue
		}
		if !strings.HasPrefix(word, "-") {
			positional = append(positional, word)
			continue
		}
		if len(arguments) == 0 {
			return given, fmt.Errorf("%s needs a value", word)
		}
		value := arguments[0]
		arguments = arguments[1:]
		switch word {
		case "-f", "--values":
			given.files = append(given.files, value)
		case "--set":
			given.sets = append(given.sets, value)
		case "-n", "--namespace":
			given.namespace = value
		default:
			return given, fmt.Errorf("unknown flag: %s", word)
		}
	}
	if len(positional) != 2 {
		return given, errors.New("needs a release and a chart")
	}
	given.release, given.chart = positional[0], positional[1]
	return given, nil
}

// manifests joins what the templates made in the order of their paths, without empty ones.
func manifests(rendered map[string]string) string {
	var names []string
	for name, text := range rendered {
		if name != "NOTES.txt" && strings.TrimSpace(text) != "" {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	var all strings.Builder
	for _, name := range names {
		fmt.Fprintf(&all, "---\n# Source: %s\n%s\n", name, strings.TrimSpace(rendered[name]))
	}
	return all.String()
}

// chart is a chart's directory: its metadata, its values and its files by their path.
type chart struct {
	metadata map[string]interface{}
	defaults map[string]interface{}
	schema   []byte
	sources  map[string]string
	files    files
}

func load(root string) (*chart, error) {
	loaded := &chart{sources: map[string]string{}, files: files{}}
	err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		switch {
		case name == "Chart.yaml":
			return yaml.Unmarshal(content, &loaded.metadata)
		case name == "values.yaml":
			return yaml.Unmarshal(content, &loaded.defaults)
		case name == "values.schema.json":
			loaded.schema = content
		case strings.HasPrefix(name, "templates/"):
			loaded.sources[name] = string(content)
		default:
			loaded.files[name] = content
		}
		return nil
	})
	if err == nil && loaded.metadata == nil {
		err = fmt.Errorf("Chart.yaml file is missing in %s", root)
	}
	return loaded, err
}

// values merges defaults, files and --set, and checks the result by the schema.
func (c *chart) values(given options) (map[string]interface{}, error) {
	user := map[string]interface{}{}
	for _, path := range given.files {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		var more map[string]interface{}
		if err := yaml.Unmarshal(content, &more); err != nil {
			return nil, fmt.Errorf("failed to parse %s: %w", path, err)
		}
		user = merge(user, more, false)
	}
	for _, text := range given.sets {
		for _, assignment := range split(text, ',') {
			if err := assign(user, assignment); err != nil {
				return nil, err
			}
		}
	}
	values := merge(c.defaults, user, true)
	if c.schema == nil {
		return values, nil
	}
	result, err := gojsonschema.Validate(gojsonschema.NewBytesLoader(c.schema), gojsonschema.NewGoLoader(values))
	if err != nil {
		return nil, err
	}
	if !result.Valid() {
		text := "values don't meet the specifications of the schema(s) in the following chart(s):\n"
		for _, problem := range result.Errors() {
			text += fmt.Sprintf("- %s\n", problem)
		}
		return nil, errors.New(text)
	}
	return values, nil
}

// merge puts over onto base: maps are merged, everything else is replaced. A null removes the default of a key.
func merge(base, over map[string]interface{}, dropNulls bool) map[string]interface{} {
	merged := map[string]interface{}{}
	for key, value := range base {
		merged[key] = value
	}
	for key, value := range over {
		below, isMap := value.(map[string]interface{})
		old, wasMap := merged[key].(map[string]interface{})
		switch {
		case value == nil && dropNulls:
			delete(merged, key)
		case isMap && wasMap:
			merged[key] = merge(old, below, dropNulls)
		default:
			merged[key] = value
		}
	}
	return merged
}

// assign applies one key=value of --set; a dot in a key is written as \. and a list as {a,b}.
func assign(into map[string]interface{}, assignment string) error {
	key, text, found := strings.Cut(assignment, "=")
	if !found {
		return fmt.Errorf("failed parsing --set data: key %q has no value", assignment)
	}
	path := split(key, '.')
	for _, name := range path[:len(path)-1] {
		below, isMap := into[name].(map[string]interface{})
		if !isMap {
			below = map[string]interface{}{}
			into[name] = below
		}
		into = below
	}
	into[path[len(path)-1]] = setValue(text)
	return nil
}

func setValue(text string) interface{} {
	if strings.HasPrefix(text, "{") && strings.HasSuffix(text, "}") {
		list := []interface{}{}
		for _, each := range split(text[1:len(text)-1], ',') {
			list = append(list, setValue(each))
		}
		return list
	}
	switch text {
	case "true":
		return true
	case "false":
		return false
	case "null":
		return nil
	}
	if number, err := strconv.ParseInt(text, 10, 64); err == nil && (text == "0" || text[0] != '0') {
		return number
	}
	return text
}

// split splits at a separator outside braces, and removes the backslashes that escape it.
func split(text string, separator byte) []string {
	parts := []string{""}
	depth := 0
	for i := 0; i < len(text); i++ {
		last := len(parts) - 1
		switch {
		case text[i] == '\\' && i+1 < len(text) && text[i+1] == separator:
			i++
			parts[last] += string(text[i])
		case text[i] == separator && depth == 0:
			parts = append(parts, "")
		default:
			depth += strings.Count(text[i:i+1], "{") - strings.Count(text[i:i+1], "}")
			parts[last] += text[i : i+1]
		}
	}
	return parts
}
